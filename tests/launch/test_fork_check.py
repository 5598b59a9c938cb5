import subprocess
import sys
import threading

from server.launch.fork_check import fork_violations

COUNT_FORKS = """
import os, threading
from server.launch.board import Board
from server.launch.fork_check import check_every_fork
board = Board.create()
check_every_fork(board)
def fork():
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
fork()
print(board.num_forks, board.num_bad_forks)
stop = threading.Event()
threading.Thread(target=stop.wait).start()
fork()
stop.set()
print(board.num_forks, board.num_bad_forks)
"""


def test_every_fork_is_counted_and_one_beside_a_thread_is_reported() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", COUNT_FORKS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["1 0", "2 1"]
    assert "2 threads" in done.stderr


def test_a_second_thread_forbids_a_fork() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert any("threads" in violation for violation in fork_violations())
    finally:
        stop.set()
        thread.join()
