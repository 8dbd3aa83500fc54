"""Whether a new follower can get the newest version of a run."""

from __future__ import annotations

from support.clocked_bucket import Clocked, clocked, first_weights, publish, run
from support.verify_runs import data_of, edit
from weightwire.chain.record_paths import commit_path
from weightwire.errors import BrokenChain, DataGone, NotFound
from weightwire.inspection.readiness import Readiness, read_readiness


def read(bucket: Clocked) -> Readiness:
    return run(read_readiness(bucket))


def test_intact_run_is_ready(bucket: Clocked) -> None:
    bucket.read_only = True
    found = read(bucket)

    assert found.problem is None
    assert (found.version, found.lost, found.base) == (8, (), None)
    assert found.files
    assert found.nbytes == sum(file.size for file in found.files)


def test_empty_bucket_has_no_run() -> None:
    assert read(clocked()) == Readiness()


def test_run_without_weights_has_no_version() -> None:
    bucket = clocked()
    publish(bucket, first_weights(), 1)
    run(bucket.inner.delete(commit_path(1)))
    found = read(bucket)

    assert found.run is not None
    assert (found.version, found.problem) == (None, None)


def test_damaged_run_json_is_a_problem_and_does_not_point_to_verify(bucket: Clocked) -> None:
    bucket.write("run.json", b"damaged")
    found = read(bucket)

    assert isinstance(found.problem, BrokenChain)
    assert found.problem.hint
    assert "verify" not in found.problem.hint
    assert "restore run.json" in found.problem.hint


def test_lost_anchor_is_avoided(bucket: Clocked) -> None:
    path = data_of(bucket, 8, "anchors")
    run(bucket.inner.delete(path))
    found = read(bucket)

    assert found.problem is None
    assert found.lost == (path,)
    assert path not in {file.path for file in found.files}


def test_truncated_file_is_lost(bucket: Clocked) -> None:
    path = data_of(bucket, 8, "anchors")
    edit(bucket, path, lambda data: data.pop())
    assert read(bucket).lost == (path,)


def test_run_without_anchors_is_a_problem(bucket: Clocked) -> None:
    for path in bucket.paths("anchors/"):
        run(bucket.inner.delete(path))
    found = read(bucket)

    assert isinstance(found.problem, DataGone)
    assert found.version == 8


def test_missing_side_file_is_named(bucket: Clocked) -> None:
    [path] = [path for path in bucket.paths("files/") if path.endswith("vocab.txt")]
    run(bucket.inner.delete(path))
    problem = read(bucket).problem

    assert isinstance(problem, NotFound)
    assert problem.message == f"{bucket.url}/{path}: side file not found"
    assert problem.hint
    assert "copy tokenizer/vocab.txt" in problem.hint


def test_damaged_newest_commit_is_a_problem(bucket: Clocked) -> None:
    bucket.write(commit_path(8), b"damaged")
    found = read(bucket)

    assert isinstance(found.problem, BrokenChain)
    assert found.run is not None


def test_base_checkpoint_is_named() -> None:
    bucket = clocked()
    publish(bucket, first_weights(), 1, base=first_weights(), source="org/model", anchor_every=9)
    found = read(bucket)

    assert (found.base, found.problem) == ("org/model", None)
