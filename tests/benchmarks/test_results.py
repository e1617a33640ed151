from benchmarks.results import put, section

RESULT = {
    "benchmark": "speed",
    "command": ["python", "/somewhere/benchmarks/speed.py", "--quick", "--json", "/tmp/x.json"],
    "finished": "2026-01-02T03:04:05Z",
    "machine": {
        "cpu": "a processor",
        "cores": 2,
        "memory_gib": 23,
        "load_1min": 0.5,
        "python": "3.11.7",
        "system": "Linux",
        "versions": {"torch": "2.13.0", "vllm": "absent"},
    },
    "claims": [
        {"name": "fast", "value": 8.1234567, "target": ">= 8", "met": True},
        {"name": "small", "value": 3.0, "target": "<= 2", "met": False},
    ],
}


def test_a_section_says_what_was_measured_where_and_what_was_not_met():
    text = section(RESULT)
    assert "`python -m benchmarks.speed --quick`" in text
    assert "/somewhere" not in text and "x.json" not in text
    assert "| `fast` | 8.123 | >= 8 | yes |" in text
    assert "| `small` | 3 | <= 2 | **no** |" in text
    assert "torch 2.13.0" in text and "vllm" not in text


def test_a_second_result_replaces_the_first_and_keeps_the_prose():
    text = put("# Results\n", RESULT) + "\nA remark.\n"
    other = put(text, {**RESULT, "benchmark": "size"})
    again = put(other, {**RESULT, "finished": "2027-01-01T00:00:00Z"})
    assert again.count("## speed") == again.count("## size") == 1
    assert again.index("## speed") < again.index("A remark.") < again.index("## size")
    assert "2027-01-01" in again


def test_results_of_a_gpu_stand_beside_those_of_a_processor():
    on_gpu = {**RESULT, "machine": {**RESULT["machine"], "gpus": ["NVIDIA H200"]}}
    both = put(put("# Results\n", RESULT), on_gpu)
    assert "\n## speed\n" in both and "\n## speed on 1 NVIDIA H200\n" in both
    assert "- machine: NVIDIA H200, a processor" in both
    assert put(both, on_gpu) == both
