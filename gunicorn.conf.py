"""Names the app, the workers and the hooks; every value and every line of logic is in server.launch."""

from server.launch import dirty_arbiter, master, preload

_options = preload.gunicorn_options()

wsgi_app = "server.launch.stand_ins:app"  # the real ones come in when_ready
worker_class = "server.launch.stand_ins.WebWorker"
preload_app = True
logger_class = "server.launch.gunicorn_logger.GunicornLogger"
dirty_apps = ["server.engine.worker:ModelWorker:1"]
dirty_workers = 1
control_socket_disable = True  # its thread would make every later fork unsafe; its path is shared by all instances

bind = _options.bind
workers = _options.workers
proc_name = _options.proc_name
worker_tmp_dir = _options.worker_tmp_dir
keepalive = _options.keepalive
timeout = _options.timeout
dirty_timeout = _options.dirty_timeout
dirty_graceful_timeout = _options.dirty_graceful_timeout
graceful_timeout = _options.graceful_timeout
loglevel = _options.loglevel

on_starting = master.on_starting
when_ready = master.when_ready
post_fork = master.post_fork
on_exit = master.on_exit
on_dirty_starting = dirty_arbiter.on_dirty_starting
