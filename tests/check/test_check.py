"""The checker on scripts: those with a published bug, their mended twins, correct ones, and ones that misbehave.

A script in `wrong` is its mended twin as well: the twin has no line that ends in `# wrong`, and has the code that
stands behind `# mended:`. A finding is expected at each `<- finding`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from processes import CLEAN, free_port, platform_env, run
from processes import begin as start

from ddpkit.tools import cli
from ddpkit.tools.check import facts as observed
from ddpkit.tools.check import find_all
from ddpkit.tools.check.facts import Facts, Order
from ddpkit.tools.check.samples import _validated_in_training

HERE = Path(__file__).parent
LATE = 600.0  # seconds in which a check of a tiny script ends on any machine
MARK = re.compile(r"# (?:wrong )?<- ([\w-]+)")
QUICK = ["text_diffusion_loader", "image_restoration", "sampled_logging"]  # the storm has them all


def scripts(kind: str) -> list[Any]:
    """Return the scripts of a folder, marked with the packages of others that they import."""
    found = []
    for path in sorted((HERE / kind).glob("*.py")):
        packages = re.findall(r"^(?:from|import) (accelerate|lightning_fabric)", path.read_text(), re.MULTILINE)
        marks = [pytest.mark.peers(*packages)] if packages else []
        found.append(pytest.param(path, id=path.stem, marks=marks))
    return found


def mend(path: Path, folder: Path) -> Path:
    """Write the mended twin of a script into a folder."""
    text = re.sub(r".*  # wrong\b.*\n", "", path.read_text())
    twin = folder / path.name
    twin.write_text(re.sub(r"# mended: ?", "", text))
    return twin


def begin(words: list[str], out: str, news: float = LATE) -> None:
    """Be the command line, in a process that has imported torch."""
    os.environ["OUT"] = out
    observed._AFTER_END = 4.0
    observed._NEWS = news
    sys.path[0] = str(Path(out))
    sys.exit(cli.main(["check", *words]))


def check(path: Path, out: Path, *flags: str) -> tuple[int | None, dict[str, Any]]:
    """Check a script; return the exit code and the report."""
    words = ["--json", "--timeout", "120", *flags, str(path)]
    (ended,) = run(begin, [{"OMP_NUM_THREADS": "1"}], words, str(out), timeout=LATE)
    return ended.code, report_in(ended.output)


def report_in(output: str) -> dict[str, Any]:
    """Parse the report, before which a slow machine has progress and torch's warnings."""
    report: dict[str, Any] = json.loads(output[output.index("{") :])
    return report


def lines_of(finding: dict[str, Any]) -> list[int]:
    """The line of a finding, and those that it names besides."""
    return [place["line"] for place in (finding["where"], *finding["also"]) if place]


def is_found(path: Path, report: dict[str, Any]) -> bool:
    """Whether each bug that a script marks is found, at a marked line, and no other."""
    marked = [(match[1], n) for n, line in enumerate(path.read_text().splitlines(), 1) if (match := MARK.search(line))]
    kinds = {kind for kind, _ in marked}
    found = report["findings"]
    if {finding["kind"] for finding in found} != kinds:
        return False
    return all(any((finding["kind"], line) in marked for line in lines_of(finding)) for finding in found)


@pytest.mark.parametrize("name", QUICK)
def test_a_common_bug_is_found_at_its_line_and_its_mended_twin_passes(name: str, tmp_path: Path) -> None:
    path = HERE / "wrong" / f"{name}.py"
    code, report = check(path, tmp_path)
    assert is_found(path, report), report["findings"]
    assert code == 1
    code, report = check(mend(path, tmp_path), tmp_path)
    assert (code, report["findings"], report["trouble"]) == (0, [], "")


def test_on_two_ranks_a_half_that_is_multiplied_by_the_ranks_is_not_surely_divided_twice(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    own = "rows = model(torch.randn(5 + dist.get_rank(), 3))"
    loss = "0.5 * torch.nn.functional.mse_loss(rows, 0 * rows, reduction='sum') * dist.get_world_size() / 11"
    script.write_text(TRAIN.replace("loss = model(torch.randn(5, 3)).square().mean()", f"{own}\n    loss = {loss}"))
    code, report = check(script, tmp_path)
    assert (code, [finding["severity"] for finding in report["findings"]]) == (0, ["suspicious"]), report
    script.write_text(script.read_text().replace("0.5 * ", "").replace(" * dist.get_world_size()", ""))
    code, report = check(script, tmp_path)
    assert (code, [finding["severity"] for finding in report["findings"]]) == (1, ["wrong"]), report


@pytest.mark.storm
@pytest.mark.parametrize("path", scripts("wrong"))
def test_each_published_bug_is_found_at_its_line(path: Path, tmp_path: Path) -> None:
    code, report = check(path, tmp_path)
    assert is_found(path, report), report["findings"]
    assert report["unobserved"] == {}
    severities = {finding["severity"] for finding in report["findings"]}
    assert code == 1 or "wrong" not in severities


@pytest.mark.storm
@pytest.mark.parametrize("path", [*scripts("wrong"), *scripts("correct")])
def test_nothing_is_found_in_a_mended_or_correct_script(path: Path, tmp_path: Path) -> None:
    script = mend(path, tmp_path) if path.parent.name == "wrong" else path
    code, report = check(script, tmp_path)
    assert report["findings"] == []
    assert report["unobserved"] == {}
    assert (code, report["trouble"]) == (0, "")


TRAIN = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.randn(5, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
BAD = {
    "import torch\n": "without a step",
    "": "without a step",
    "import sys\nsys.exit(3)\n": "exited with code 3",
    "import sys\nsys.exit('no data')\n": "exited with code 1",
    "this is no Python\n": "SyntaxError",
    "raise ValueError('no such data')\n": "ValueError: no such data",
    "import torch\ntorch.Generator('cuda')\n": "The script needs a GPU",
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n": "was killed by SIGKILL",
    "import torch.multiprocessing as mp\ndef f(i): ...\nmp.spawn(f, nprocs=2)\n": "ProcessExitedException",
    "import multiprocessing as mp, torch.distributed as dist\n"
    "p = mp.Process(target=dist.init_process_group, args=('gloo',))\n"
    "p.start()\np.join()\n": "starts processes of its own",
}


@pytest.mark.parametrize("text", BAD)
def test_a_script_that_cannot_be_checked_gets_a_clear_word(text: str, tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text(text)
    code, report = check(script, tmp_path)
    assert code == 2
    assert BAD[text] in report["trouble"]
    assert report["findings"] == []


def test_a_script_that_hangs_is_ended_with_the_stacks_and_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    sleeper = "import os, time; open(os.environ['OUT'] + '/pid', 'w').write(str(os.getpid())); time.sleep(3600)"
    start = (
        f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {sleeper!r}], start_new_session=True)"
    )
    script.write_text(f"{start}\n\ndef wait_for_ever():\n    time.sleep(3600)\n\nwait_for_ever()\n")
    words = ["--json", "--timeout", "3", str(script)]
    (ended,) = run(begin, [{"OMP_NUM_THREADS": "1"}], words, str(tmp_path), 1.0, timeout=LATE)
    progress, brace, text = ended.output.partition("{")
    report = json.loads(brace + text)
    assert ended.code == 2
    assert re.search(r"^ddpkit: \d+ s, optimizer step 0 of at most 15 \.\.\.$", progress, re.MULTILINE)
    assert "no rank made progress for 3 s" in report["trouble"]
    assert any("wait_for_ever" in line for line in report["details"])
    with suppress(FileNotFoundError):  # it may not have begun
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_rank_that_goes_on_when_another_has_ended_is_named_with_its_stack(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    parting = "    if dist.get_rank():\n        sys.exit(0)\n    import time\n    time.sleep(600)"
    script.write_text(TRAIN.replace("    optimizer.step()", f"    optimizer.step()\n{parting}"))
    code, report = check(script, tmp_path)
    assert (code, report["findings"]) == (2, [])
    assert "rank 0 did not end after rank 1 had ended" in report["trouble"] and report["seconds"] < 100.0
    assert any("train.py" in line for line in report["details"])


def test_a_rank_that_waits_in_a_forward_for_one_that_has_ended_is_named_with_its_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    parting = "    optimizer.step()\n    if dist.get_rank(): sys.exit(0)"
    script.write_text(TRAIN.replace("    optimizer.step()", parting))
    code, report = check(script, tmp_path)
    assert code == 1
    assert any("forward of DDP" in finding["evidence"] for finding in report["findings"]), report


def test_an_exception_on_one_rank_is_told_and_no_bug_of_order(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    fault = "if step == 2 and dist.get_rank(): raise RuntimeError('out of memory')"
    script.write_text(TRAIN.replace("    loss.backward()", f"    {fault}\n    loss.backward()"))
    code, report = check(script, tmp_path)
    assert (code, report["findings"]) == (2, [])
    assert "rank 1 failed after 2 optimizer steps at " in report["trouble"]
    assert "train.py:11: RuntimeError: out of memory" in report["trouble"]


def test_a_healthy_script_is_checked_on_three_ranks_with_its_own_arguments(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN + "assert sys.argv[1:] == ['--lr', '1', '-n'], sys.argv\n")
    words = ["--json", "-n", "3", str(script), "--lr", "1", "-n"]
    (ended,) = run(begin, [{"OMP_NUM_THREADS": "1"}], words, str(tmp_path), timeout=LATE)
    report = report_in(ended.output)
    assert (ended.code, report["findings"], report["trouble"], report["ranks"]) == (0, [], "", 3)


@pytest.mark.storm
def test_a_module_of_a_package_is_checked(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "names.py").write_text("BACKEND = 'gloo'\n")
    text = TRAIN.replace('"gloo"', "BACKEND") + "assert sys.argv[1:] == ['-m', '5'], sys.argv\n"
    (package / "train.py").write_text("from .names import BACKEND\n" + text.replace("model(t", "model.module(t"))
    command = [sys.executable, "-m", "ddpkit", "check", "--json", "-m", "package.train", "-m", "5"]
    env = {**CLEAN, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LATE)
    report = json.loads(done.stdout)
    (finding,) = report["findings"]
    assert (done.returncode, finding["kind"], report["trouble"]) == (1, "gradients-not-averaged", "")
    assert finding["where"]["file"].endswith("train.py") and finding["where"]["line"] == 10


AVERAGES = {
    "nothing": (),
    "the gradients of some": ("for p in [*model.parameters()][:1]: dist.all_reduce(p.grad)",),
    "gathered gradients": (
        "for p in model.parameters(): dist.all_gather([torch.empty_like(p.grad), p.grad], p.grad.clone())",
    ),
    "one vector": ("dist.broadcast(torch.cat([p.detach().flatten() for p in model.parameters()]), 0)",),
    "by ddpkit": ("import ddpkit; ddpkit.average_gradients(model)",),
    "as a tree": ("import ddpkit; ddpkit.all_reduce_mean([p.grad for p in model.parameters()])",),
}


@pytest.mark.storm
@pytest.mark.parametrize("what", AVERAGES)
def test_ranks_are_compared_where_something_says_that_they_hold_replicas(what: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    own = TRAIN.replace("dist.get_rank()", "0").replace("torch.nn.parallel.DistributedDataParallel", "")
    lines = "".join(f"    {line}\n" for line in AVERAGES[what])
    script.write_text(own.replace("    optimizer.step()", f"{lines}    optimizer.step()"))
    code, report = check(script, tmp_path)
    found = [finding["kind"] for finding in report["findings"]]
    assert (code, found) == ((1, ["same-samples"]) if lines else (0, [])), report


def test_gradients_are_clipped_as_without_the_check(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    clip = "    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0"
    script.write_text(TRAIN.replace("    optimizer.step()", f"{clip}\n    optimizer.step()"))
    code, report = check(script, tmp_path)
    assert (code, report["findings"], report["trouble"]) == (0, [], "")


def test_a_script_that_asks_for_nccl_gets_gloo_where_there_is_no_gpu(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace('"gloo"', '"nccl"'))
    code, report = check(script, tmp_path)
    assert (code, report["findings"], report["trouble"]) == (0, [], "")


def test_a_script_whose_ranks_meet_at_an_address_of_their_own_is_checked(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    start = 'dist.init_process_group("gloo"'
    method = f'init_method="tcp://127.0.0.1:{free_port()}", rank=int(os.environ["RANK"]), world_size=2'
    script.write_text("import os" + TRAIN.replace(start, f"{start}, {method}"))
    code, report = check(script, tmp_path)
    assert (code, report["findings"], report["trouble"]) == (0, [], "")


def test_the_report_is_readable_and_names_line_evidence_and_fix(tmp_path: Path) -> None:
    words = [str(HERE / "wrong" / "time_series_answers.py")]
    (ended,) = run(begin, [{"OMP_NUM_THREADS": "1"}], words, str(tmp_path), timeout=LATE)
    assert ended.code == 1
    assert re.search(r"^wrong +gradients-not-averaged +\S*time_series_answers.py:\d+$", ended.output, re.MULTILINE)
    assert re.search(r"gradients\s+of\s+ranks\s+0\s+and\s+1\s+differ\s+by\s+\d+%", ended.output)
    assert "fix: call the wrapped model, `model(x)`" in ended.output
    assert ended.output.rstrip().endswith("1 wrong")
    assert len(ended.output.splitlines()) < 24 and "\033" not in ended.output


def test_the_report_of_a_script_that_fails_says_no_more_than_that(tmp_path: Path) -> None:
    lines = 'import ddpkit\nraise ddpkit.CheckpointError("no file\\nin this folder")\n'
    (tmp_path / "bad.py").write_text(lines)
    (ended,) = run(begin, [{"OMP_NUM_THREADS": "1"}], [str(tmp_path / "bad.py")], str(tmp_path), timeout=LATE)
    assert ended.code == 2 and "bad.py, 0 optimizer steps\n" in ended.output
    assert "nothing found" not in ended.output
    assert re.search(r"^ended early: rank [01] failed after .*: CheckpointError: no file$", ended.output, re.MULTILINE)


WEIGHTED = """
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 3))
for (x,) in DataLoader(data, 4, sampler=WeightedRandomSampler(torch.rand(64), 64)):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


def test_who_draws_by_weights_is_not_told_to_draw_without(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN[: TRAIN.index("for ")] + WEIGHTED)
    _, report = check(tmp_path / "train.py", tmp_path)
    (finding,) = report["findings"]
    assert finding["kind"] == "same-samples" and "seed + rank" in finding["fix"], report


def test_under_a_launcher_it_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in platform_env(0, 2, 1).items():
        monkeypatch.setenv(name, value)
    assert cli.main(["check", str(HERE / "wrong" / "layout_gan.py")]) == 2
    assert "without a launcher" in capsys.readouterr().err


def test_ctrl_c_ends_a_check_and_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    tell = "open(os.environ['OUT'] + '/' + os.environ['RANK'], 'w').write(str(os.getpid()))"
    script.write_text(f"import os, time\n{tell}\ntime.sleep(3600)\n")
    process = start(begin, {"OMP_NUM_THREADS": "1"}, [str(script)], str(tmp_path), output=str(tmp_path / "output"))
    deadline = time.monotonic() + LATE
    pids: list[str] = []
    while len(pids) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        pids = [text for rank in "01" if (tmp_path / rank).exists() and (text := (tmp_path / rank).read_text())]
    os.kill(process.pid, signal.SIGINT)
    process.join(LATE)
    assert process.exitcode == 130
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def collective(op: str, line: int, **more: Any) -> dict[str, Any]:
    place = ["train.py", line, "main"]
    return {"kind": "collective", "group": "0", "op": op, "where": [place], **more}


def test_collectives_in_another_order_are_found_before_they_meet() -> None:
    order = Order([0, 1])
    order.take(0, collective("all_reduce", 3, dtype="float32", shape=[2], reduction="SUM"))
    order.take(1, collective("all_reduce", 3, dtype="float32", shape=[2], reduction="SUM"))
    order.take(0, collective("barrier", 5))
    assert order.parted is None
    order.take(1, collective("broadcast", 7, dtype="float32", shape=[2]))
    assert order.parted is not None
    assert order.parted.ranks == (1, 0)


def test_a_rank_that_has_ended_parts_from_one_that_goes_on() -> None:
    order = Order([0, 1])
    order.take(0, {"kind": "end", "error": "", "code": 0})
    order.take(1, collective("barrier", 5))
    facts = Facts({0: [], 1: []}, order.parted)
    (finding,) = find_all(facts)
    assert (finding.kind, str(finding.where)) == ("collective-order", "train.py:5")
    assert "rank 0 has ended" in finding.evidence


def epoch(loader: str, base: int) -> dict[str, Any]:
    lines = {key: [["train.py", 3, "main"]] for key in ("made", "where", "sampler_made", "lines", "split")}
    of_sampler = {"sampler": "DistributedSampler", "has_epoch": True, "bounded": True, "rounds": 1, "replaces": False}
    of_loader = {"iterable": False, "batch_size": 2, "drop_last": False, "workers": 0}
    plan = [0, 1, 2] if loader == "train" else [0, 1]
    return {
        "kind": "epoch",
        "loader": loader,
        "number": 0,
        "plan": plan,
        "base": base,
        **lines,
        **of_sampler,
        **of_loader,
    }


@pytest.mark.parametrize(("address", "kinds"), [(1, ["validation-seen"]), (2, [])])
def test_datasets_at_one_address_of_two_processes_are_not_the_same(address: int, kinds: list[str]) -> None:
    training = [{"kind": "trains", "loader": "train"}, epoch("train", 1)]
    validating = epoch("valid", 1)
    seen_by_both = Facts({0: [*training, epoch("valid", address)], 1: [validating]})
    assert [finding.kind for finding in _validated_in_training(seen_by_both)] == kinds
    assert list(_validated_in_training(Facts({0: training, 1: [validating]}))) == []


def test_one_rank_has_nothing_to_compare() -> None:
    assert find_all(Facts({0: [collective("barrier", 1)]})) == []
