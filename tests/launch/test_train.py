"""The real command line: what it prints, which folders it makes, how it exits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config.files import load_config
from asyncrl.config.offline import OFFLINE
from tests.config.folders import make_model_folder

ROOT = Path(__file__).resolve().parents[2]
TRAIN = str(ROOT / "launch" / "train.py")
FAKE = str(Path(__file__).with_name("fake_mode.py"))


# Makes a process that has imported what must not be imported before the check end with 99.
WATCHER = """
import atexit, os, sys
def watch():
    heavy = {"torch", "vllm", "transformers"} & set(sys.modules)
    if heavy:
        sys.stderr.write(f"IMPORTED {heavy}\\n")
        os._exit(99)
if "RANK" in os.environ or "WATCH_WITHOUT_RANK" in os.environ:
    atexit.register(watch)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory that is not the repository, and a model to name."""
    make_model_folder(tmp_path / "model")
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """Processes started from here exit with 99 when they import torch, vLLM or transformers."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WATCHER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)]))
    monkeypatch.setenv("WATCH_WITHOUT_RANK", "1")


def start(*arguments: str, ranks: int = 0, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """Without ranks a plain Python process, else torchrun."""
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [f"--max-restarts={restarts}"]
    return subprocess.run([*command, *_typed(arguments)], capture_output=True, text=True, timeout=240)


def _typed(arguments: tuple[str, ...]) -> list[str]:
    """The script and what follows it on the command line."""
    script, *rest = arguments
    common = ["+experiment=grpo", "model.path=../model", "env.task=spell_backward", "env.task_config={}"]
    return [script, *_merge(rest, common)]


def _merge(rest: list[str], common: list[str]) -> list[str]:
    given = {text.split("=")[0] for text in rest}
    return [*rest, *(text for text in common if text.split("=")[0] not in given)]


def fake(behaviour: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return start(FAKE, behaviour, *arguments, **options)


def test_dry_run_writes_what_every_process_reads_without_importing_torch(here, watched):
    result = start(TRAIN, "run.dry=true", "optim.lr=2e-4", "env.task_config.min_word_len=3")
    assert result.returncode == 0, result.stderr
    (folder,) = [path for path in (here / "outputs").iterdir() if not path.is_symlink()]
    assert (here / "outputs" / "latest").resolve() == folder
    assert result.stdout.strip() == f"dry run, rank 0 of 1: {folder}/config.json"
    config = load_config(folder)
    assert config.optim.lr == 2e-4 and config.env.task_config["min_word_len"] == 3
    assert config.model.path == str(here.parent / "model"), "absolute, as processes may have other working directories"
    assert sorted(path.name for path in here.iterdir()) == ["outputs"], "Hydra leaves nothing behind"


@pytest.mark.parametrize("experiment", sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")))
def test_every_experiment_is_accepted(here, watched, experiment):
    """On CPUs and with a model of the folder's own where one must be made first."""
    command = [sys.executable, TRAIN, f"+experiment={experiment}", "run.dry=true", "model.compute_dtype=float32"]
    model = [] if experiment == "sft" else ["model.path=../model"]
    result = subprocess.run([*command, *model], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert load_config(here / "outputs" / "latest").trainer.steps > 0


WRONG = [
    (["optim.lrr=1"], ["optim.lrr: no such key", "did you mean optim.lr?"]),
    (["+optim.lrr=1"], ["optim.lrr: no such key", "did you mean optim.lr?"]),
    (["lr=1"], ["lr: no such key", "did you mean optim.lr?"]),
    (["optim.lr=fast"], ["optim.lr: 'fast' is not a number"]),
    (["experiment=grpo"], ["experiment: no experiment is chosen yet", "write +experiment=grpo"]),
    (["+experiment=grop"], ["experiment: there is no grop", "choose one of: dpo, grpo, grpo_smollm2, multi_lora, sft"]),
    (["env=chain_sums"], ["env: there is no chain_sums", "chain_sum, function"]),
    (["-m", "algorithm=grpo,ppp"], ["algorithm: there is no ppp"]),
    (["optim.lr={"], ["optim.lr={: cannot be read"]),
    (["sampling.top_p=0.9", "batch.group_size=1"], ["2 problems", "sampling.top_p: 0.9 biases", "batch.group_size: "]),
    (["model.path=Qwen/Qwen3-0.6B"], ["is not a folder", "hf download Qwen/Qwen3-0.6B"]),
    (["optim.lr=${nowhere.lr}"], ["optim.lr: ", "nowhere"]),
    (["optim.lr=???"], ["optim.lr: "]),
    (["env.task=spell_backwards"], ["env.task: ", "spell_backward"]),
    (["env.task_config.min_word_length=3"], ["env.task_config.min_word_length: ", "min_word_len"]),
    (["env.kind=function", "env.function=missing.py:f"], ["env.function: there is no file"]),
    (["resume=nowhere"], ["resume: ", "is not a folder"]),
]


@pytest.mark.parametrize(("arguments", "expected"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_a_mistake_ends_with_key_and_remedy_before_torch_is_imported(here, watched, arguments, expected):
    result = start(TRAIN, *arguments)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr and "nothing was started" in result.stderr
    for text in expected:
        assert text in result.stderr
    assert list(here.iterdir()) == [], "no folder was made"


@pytest.mark.parametrize(
    "arguments",
    [
        ["env=chain_sum", "env.task_config.max_terms=3"],
        ["env=reasoning_gym", "env.task=leg_counting", "env.task_config.max_animals=3"],
        ["env=function", f"env.function={ROOT}/docs/examples/addition.py:task"],
    ],
    ids=["a task of conf/env", "any task of reasoning-gym", "a function"],
)
def test_another_task_leaves_nothing_of_the_experiments_task_behind(here, watched, arguments):
    command = [sys.executable, TRAIN, "+experiment=grpo", "run.dry=true", "model.path=../model", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    config = load_config(here / "outputs" / "latest")
    assert "min_word_len" not in config.env.task_config


def test_under_torchrun_the_mistake_is_printed_once_and_no_rank_imports_torch(here, watched, monkeypatch):
    monkeypatch.delenv("WATCH_WITHOUT_RANK")  # torchrun itself needs torch; its ranks are told by RANK
    result = start(TRAIN, "optim.lrr=1", ranks=2)
    assert result.returncode == 1, "torchrun's own status; the rank's is in its report"
    printed, report = result.stderr.split("ChildFailedError", 1)
    assert printed.count("optim.lrr: no such key") == 1
    assert "exitcode  : 2" in report and "optim.lrr: no such key" in report, "torchrun's report ends with the reason"
    assert "IMPORTED" not in result.stderr


def test_torchruns_report_ends_with_the_reason_of_a_failed_run(here):
    result = fake("run_failed", ranks=1)
    assert result.returncode == 1
    assert "no group had reward variance" in result.stderr.split("Root Cause")[1]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_torchrun_ends_with_1_and_the_summary_says_interrupted(here, signum):
    """The README's table of exit statuses: torchrun has one for everything that is not success."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    process = subprocess.Popen(
        [*torchrun, *_typed((FAKE, "wait"))], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        assert "waiting\n" in iter(process.stdout.readline, "")
        process.send_signal(signum)
        assert process.wait(120) == 1
    finally:
        process.kill()
        process.wait()
    assert json.loads((here / "outputs" / "latest" / "summary.json").read_text())["ended"] == "interrupted"


def test_two_ranks_agree_on_one_folder(here):
    result = start(TRAIN, "run.dry=true", ranks=2)
    assert result.returncode == 0, result.stderr
    first, second = sorted(result.stdout.strip().splitlines())
    assert first.startswith("dry run, rank 0 of 2: ") and second.startswith("dry run, rank 1 of 2: ")
    assert first.split(": ")[1] == second.split(": ")[1]
    assert len([path for path in (here / "outputs").iterdir() if not path.is_symlink()]) == 1


def test_a_sweep_has_one_folder_a_job_and_one_process_group_a_job(here):
    result = fake("ok", "-m", "optim.lr=1e-4,3e-4", "trainer.steps=2", ranks=2)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    for rank in (0, 1):
        for job, lr in enumerate(("0.0001", "0.0003")):
            assert f"rank {rank} job {job} attempt 0 lr {lr} resume False" in lines
    folders = {line.removeprefix("folder ") for line in lines if line.startswith("folder ")}
    (sweep,) = (here / "multirun").iterdir()
    assert folders == {str(sweep / "0_optim.lr=0.0001"), str(sweep / "1_optim.lr=0.0003")}
    assert [load_config(Path(folder)).optim.lr for folder in sorted(folders)] == [1e-4, 3e-4]
    assert (here / "outputs" / "latest").resolve() == sweep / "1_optim.lr=0.0003"
    assert sorted(path.name for path in here.iterdir()) == ["multirun", "outputs"]


def test_a_sweep_has_one_wandb_run_a_job(here, monkeypatch):
    """The mode is a fake, the writer and wandb are real."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    result = fake("report", "-m", "optim.lr=1e-4,3e-4", "report.wandb.enabled=true")
    assert result.returncode == 0, result.stderr
    (sweep,) = (here / "multirun").iterdir()
    ids = {}
    for job in sweep.iterdir():
        assert json.loads((job / "summary.json").read_text())["wandb_dropped"] == 0
        (file,) = job.glob("wandb/offline-run-*/run-*.wandb")
        ids[job.name] = file.stem
    assert len(ids) == 2 and len(set(ids.values())) == 2, ids


def test_a_mistake_in_the_last_job_of_a_sweep_is_found_before_the_first_starts(here, watched):
    result = start(TRAIN, "-m", "batch.group_size=8,1", "run.dry=true")
    assert result.returncode == 2, result.stderr
    assert "batch.group_size: the advantage compares" in result.stderr
    assert list(here.iterdir()) == []


def test_a_sweep_in_one_folder_is_refused(here, watched):
    result = start(TRAIN, "-m", "optim.lr=1e-4,3e-4", "run.dir=x", "run.dry=true")
    assert result.returncode == 2 and "run.dir: names one folder for all jobs" in result.stderr


PACKED = ("-m", "+experiment=multi_lora", "run.dry=true")


def test_a_sweep_of_adapters_has_a_folder_of_mode_sft_a_job(here, watched):
    result = start(TRAIN, *PACKED, "lora.rank=2,4", "optim.lr=1e-4,2e-4")
    assert result.returncode == 0, result.stderr
    (sweep,) = (here / "multirun").iterdir()
    configs = [load_config(folder) for folder in sorted(sweep.iterdir())]
    assert [(c.mode, c.lora.rank, c.optim.lr) for c in configs] == [
        ("sft", rank, lr) for rank in (2, 4) for lr in (1e-4, 2e-4)
    ]
    again = start(TRAIN, *PACKED, "lora.rank=2,4", "optim.lr=1e-4,2e-4", f"resume={sweep}")
    assert again.returncode == 0, again.stderr
    assert [path.name for path in (here / "multirun").iterdir()] == [sweep.name]
    for folder in sweep.iterdir():
        assert f"{folder}/config.json" in again.stdout and load_config(folder).resume == str(folder)
    other = start(TRAIN, *PACKED, "lora.rank=3,5", f"resume={sweep}")
    assert other.returncode == 2 and "resume: none of these jobs is in it" in other.stderr


def test_jobs_that_cannot_be_packed_are_refused_before_anything_starts(here, watched):
    result = start(TRAIN, *PACKED, "lora.rank=2,0", "trainer.threads=1,2", "mode=multi_lora")
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert "lora.rank: is 0" in result.stderr and "trainer.threads: jobs of one pack share it" in result.stderr
    result = start(TRAIN, *PACKED, "mode=multi_lora,sft")
    assert result.returncode == 2 and "mode: the other jobs of the sweep have another one" in result.stderr
    assert list(here.iterdir()) == []


def test_a_stale_run_folder_is_refused(here, watched):
    (here / "mine").mkdir()
    (here / "mine" / "metrics.jsonl").write_text("")
    result = start(TRAIN, "run.dir=mine", "run.dry=true")
    assert result.returncode == 2
    assert "run.dir: " in result.stderr and "is not empty" in result.stderr and "resume=" in result.stderr
    assert [path.name for path in (here / "mine").iterdir()] == ["metrics.jsonl"]


def test_resume_goes_on_in_the_runs_own_folder(here, watched):
    assert start(TRAIN, "run.dry=true").returncode == 0
    folder = (here / "outputs" / "latest").resolve()
    result = start(TRAIN, "run.dry=true", "resume=outputs/latest", "optim.lr=5e-4")
    assert result.returncode == 0, result.stderr
    assert f"{folder}/config.json" in result.stdout
    assert load_config(folder).optim.lr == 5e-4 and load_config(folder).resume == str(folder)
    refused = start(TRAIN, "run.dry=true", "resume=outputs/latest", "seed=5")
    assert refused.returncode == 2 and "seed: 5 now, 0 in" in refused.stderr


@pytest.mark.parametrize(
    ("behaviour", "status", "told", "traceback"),
    [
        ("ok", 0, "", False),
        ("run_failed", 1, "asyncrl: rank 0: no group had reward variance", False),
        ("bug", 1, "ZeroDivisionError: a bug", True),
        ("interrupt", 130, "asyncrl: rank 0: interrupted", False),
    ],
)
def test_exit_status_and_reason(here, behaviour, status, told, traceback):
    result = fake(behaviour)
    assert result.returncode == status
    assert told in result.stderr and ("Traceback" in result.stderr) == traceback
    record = json.loads((here / "outputs" / "latest" / "launch.json").read_text())
    assert record["returned"] == (status == 0)


def test_a_restart_by_torchrun_skips_finished_jobs_and_resumes_the_broken_one(here):
    result = fake("fail_once_in_job_1", "-m", "optim.lr=1e-4,3e-4,5e-4", ranks=2, restarts=1)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("rank 0")]
    assert lines == [
        "rank 0 job 0 attempt 0 lr 0.0001 resume False",
        "rank 0 job 1 attempt 0 lr 0.0003 resume False",
        "rank 0 job 1 attempt 1 lr 0.0003 resume True",
        "rank 0 job 2 attempt 1 lr 0.0005 resume False",
    ]
    (sweep,) = (here / "multirun").iterdir()
    assert sorted(path.name[0] for path in sweep.iterdir()) == ["0", "1", "2"]


def test_nothing_is_downloaded_or_reported(here, monkeypatch):
    """A mode and its children find the offline variables set; a user's own value wins."""
    for name in OFFLINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    result = fake("offline")
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[0])
    assert told == OFFLINE | {"HF_HUB_OFFLINE": "0"}
