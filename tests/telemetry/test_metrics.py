"""Totals are those of all web workers, the living and the dead; the engine's numbers are the board's."""

import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.launch.board import Board, ModelState, Role
from server.telemetry.metrics import RequestMetrics, kv_usage

WORKERS = """
import os
from server.launch.board import Board
from server.telemetry.metrics import RequestMetrics

metrics, board = RequestMetrics("m"), Board.create()
metrics.count_finished("stop")  # in the master: must not be counted once per fork
for worker in range(4):
    pid = os.fork()
    if pid == 0:
        for _ in range(100):
            metrics.count_finished("stop")
            metrics.time_to_first_token.observe(0.05)
        if worker == 3:
            os.write(1, metrics.render(board))
        os._exit(0)
    os.waitpid(pid, 0)
os.write(1, b"MASTER" + metrics.render(board))
"""


@pytest.fixture
def board():
    return Board.create()


def samples_of(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value_of(metrics, board, name, **labels):
    samples = samples_of(metrics.render(board).decode())
    return samples[name, *sorted({"model_name": "m", **labels}.items())]


def test_totals_are_those_of_all_workers_from_any_of_them():
    command = [sys.executable, "-c", WORKERS]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for text in output.split("MASTER"):
        samples = samples_of(text)
        key = (("finished_reason", "stop"), ("model_name", "m"))
        assert samples["model_server_request_success_total", *key] == 401
        assert samples["model_server_time_to_first_token_seconds_count", ("model_name", "m")] == 400
        assert samples["vllm:time_to_first_token_seconds_count", ("model_name", "m")] == 400


def test_requests_are_counted_under_both_names(board):
    metrics = RequestMetrics("m")
    metrics.count_finished("length")
    metrics.count_error(422)
    metrics.inter_token_latency.observe(0.004)
    assert value_of(metrics, board, "model_server_request_success_total", finished_reason="length") == 1
    assert value_of(metrics, board, "vllm:request_success_total", finished_reason="length") == 1
    assert value_of(metrics, board, "vllm:inter_token_latency_seconds_bucket", le="0.004") == 1
    assert value_of(metrics, board, "model_server_http_errors_total", status="422") == 1
    assert "vllm:http_errors" not in metrics.render(board).decode()


@pytest.mark.parametrize("gap_s", [0.0, 0.0019, 0.002, 0.0021, 0.5, 5, 5.1, 1e9])
def test_gaps_observed_together_are_as_many_observations(board, gap_s):
    together, apart = RequestMetrics("m"), RequestMetrics("m")
    together.observe_gaps(gap_s, 3)
    for _ in range(3):
        apart.inter_token_latency.observe(gap_s)
    assert together.render(board) == apart.render(board)


def test_a_status_that_nobody_expected_is_counted(board):
    metrics = RequestMetrics("m")
    metrics.count_error(418)
    assert value_of(metrics, board, "model_server_http_errors_total", status="other") == 1


def test_two_instances_in_one_process_do_not_share(board):
    first, second = RequestMetrics("m"), RequestMetrics("m")
    first.count_finished("stop")
    second.count_error(500)
    assert value_of(first, board, "model_server_request_success_total", finished_reason="stop") == 1
    assert value_of(second, board, "model_server_request_success_total", finished_reason="stop") == 0
    assert value_of(first, board, "model_server_http_errors_total", status="500") == 0
    assert value_of(second, board, "model_server_http_errors_total", status="500") == 1


def test_engine_state_comes_from_the_board(board):
    metrics = RequestMetrics("m")
    board.num_running, board.num_waiting, board.num_preemptions = 3, 2, 7
    board.num_kv_blocks, board.num_free_kv_blocks, board.block_size = 100, 25, 16
    board.prefix_query_tokens, board.prefix_hit_tokens = 50, 20
    board.num_prompt_tokens, board.num_generated_tokens, board.step = 1000, 5000, 9
    board.model_state, board.num_engine_starts = ModelState.READY, 2
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.75,
        "num_preemptions_total": 7,
        "prefix_cache_queries_total": 50,
        "prefix_cache_hits_total": 20,
        "prompt_tokens_total": 1000,
        "generation_tokens_total": 5000,
    }
    for name, value in expected.items():
        for prefix in ("model_server_", "vllm:"):
            assert value_of(metrics, board, prefix + name) == value
    assert value_of(metrics, board, "model_server_ready") == 1
    assert value_of(metrics, board, "model_server_engine_starts_total") == 2
    assert value_of(metrics, board, "model_server_engine_steps_total") == 9
    assert value_of(metrics, board, "vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1


def test_finished_stages_of_the_start_are_reported(board):
    metrics = RequestMetrics("m")
    for num_bytes in (100, 50):
        stage = board.begin_stage(Role.LOADER, "read")
        stage.end, stage.num_bytes = stage.begin + 2, num_bytes
    board.begin_stage(Role.MODEL, "unfinished")
    labels = {"role": "loader", "stage": "read"}
    assert value_of(metrics, board, "model_server_startup_seconds", **labels) == pytest.approx(4)
    assert value_of(metrics, board, "model_server_startup_bytes", **labels) == 150
    assert "unfinished" not in metrics.render(board).decode()


def test_the_whole_start_its_critical_path_and_the_last_restart_are_reported(board):
    metrics = RequestMetrics("m")
    board.started_at = 100.0
    board.begin_stage(Role.MASTER, "python and gunicorn", 100.0)
    board.start[Role.MASTER].end(100.5)
    assert "startup_ready_seconds{" not in metrics.render(board).decode()
    board.start[Role.MODEL].ready_at, board.web_ready_at, board.num_graphs = 101.5, 102.0, 3
    board.begin_stage(Role.WEB, "uvicorn", 100.5)
    board.start[Role.WEB].end(102.0)
    board.ready_at = board.engine_beat = 101.5
    board.note_loss()
    board.begin_life(Role.MODEL, board.reaped_at)
    board.restart[Role.MODEL].ready_at = 102.25
    assert value_of(metrics, board, "model_server_startup_ready_seconds") == pytest.approx(2)
    for role, stage, seconds in (("master", "python and gunicorn", 0.5), ("web", "uvicorn", 1.5)):
        labels = {"role": role, "stage": stage}
        assert value_of(metrics, board, "model_server_startup_critical_seconds", **labels) == pytest.approx(seconds)
    assert value_of(metrics, board, "model_server_restart_seconds", role="model") == pytest.approx(0.75)
    assert value_of(metrics, board, "model_server_graphs") == 3
    assert "vllm:startup" not in metrics.render(board).decode()


def test_usage_of_a_pool_that_does_not_exist_yet_is_zero(board):
    assert kv_usage(board) == 0
