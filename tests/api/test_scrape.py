"""/metrics counts what was served."""

from tests.api.service import wait_until


def test_each_answer_is_counted_once_whatever_its_route(service):
    def counts():
        return [service.metric("request_success_total", finished_reason=reason) for reason in ("stop", "length")]

    stops, lengths = counts()
    errors = service.metric("http_errors_total", status="422")
    first_tokens = service.metric("time_to_first_token_seconds_count")
    queued = service.metric("request_queue_time_seconds_count")
    service.post("/generate", {"inputs": "abc<|im_end|>"})
    service.post("/generate_stream", {"inputs": "abc", "parameters": {"stop": "c"}})
    service.post("/", {"inputs": "abc", "stream": True, "parameters": {"max_new_tokens": 2}})
    service.post("/v1/completions", {"prompt": ["ab", "cd"], "max_tokens": 2})
    service.post("/generate", {"inputs": ""})
    assert counts() == [stops + 2, lengths + 3]
    assert service.metric("http_errors_total", status="422") == errors + 1
    assert service.metric("time_to_first_token_seconds_count") == first_tokens + 5
    assert service.metric("request_queue_time_seconds_count") == queued + 5


def test_each_gap_between_two_tokens_is_counted_streamed_or_not(service):
    before = service.metric("inter_token_latency_seconds_count")
    service.post("/generate", {"inputs": "abc", "parameters": {"max_new_tokens": 5}})
    service.post("/generate_stream", {"inputs": "abc", "parameters": {"max_new_tokens": 5}})
    service.post("/v1/completions", {"prompt": ["ab", "cd"], "max_tokens": 3})
    assert service.metric("inter_token_latency_seconds_count") == before + 4 + 4 + 2 + 2


def test_generated_tokens_are_the_engines(service):
    before = service.metric("generation_tokens_total")
    service.post("/generate", {"inputs": "abc", "parameters": {"max_new_tokens": 5}})
    wait_until(lambda: service.metric("generation_tokens_total") == before + 5)


def test_scrape_is_prometheus_text(service):
    response = service.client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "# TYPE vllm:num_requests_running gauge" in response.text
