import pytest

from benchmarks.grpo_vs_trl import SMOOTH, WARM, conclude, seconds_per_step, smoothed, time_to


def trace(seconds: float, rewards: list[float]) -> list[dict]:
    """Steps of ``seconds`` each after first ones that took ten times as long."""
    times = [10.0 * seconds * min(n, WARM) + seconds * max(0, n - WARM) for n in range(1, len(rewards) + 1)]
    pairs = zip(times, rewards, strict=True)
    return [{"step": n, "time_s": t, "reward": r, "length_mean": 4.0} for n, (t, r) in enumerate(pairs, 1)]


RISING = [n / 20 for n in range(20)]


def test_the_first_steps_are_not_timed():
    assert seconds_per_step(trace(0.5, RISING)) == pytest.approx(0.5)


def test_too_few_steps_are_an_error():
    with pytest.raises(SystemExit, match="only 3 steps"):
        seconds_per_step(trace(0.5, RISING[:WARM]))


def test_time_to_a_reward_uses_the_moving_mean():
    run = trace(1.0, RISING)
    assert len(smoothed(run)) == len(RISING) - SMOOTH + 1
    assert smoothed(run)[0] == (pytest.approx(32.0), pytest.approx(0.1))
    assert time_to(run, 0.1) == pytest.approx(32.0)
    assert time_to(run, 2.0) is None


def test_the_better_of_ours_is_compared():
    legs = {
        "trl": {"setting": "tuned", "trace": trace(4.0, RISING)},
        "ours": {"S=0": {"trace": trace(1.0, RISING)}, "S=1": {"trace": trace(0.5, [r / 2 for r in RISING])}},
    }
    for row in legs["trl"]["trace"]:
        row["length_mean"] = 8.0
    figures = conclude(legs)
    assert figures["ours_best"] == "S=1"
    assert figures["step_speedup"] == pytest.approx(8.0)
    assert figures["token_speedup"] == pytest.approx(4.0)
    assert figures["trl_s_to_reward"] == pytest.approx(8 * figures["ours_s_to_reward"]["S=0"] / 2)
