"""Every error is provoked, reads well, and is listed in docs/errors.md."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from project.error_catalogue import PAGE, Catalogue, Provoked, error_names, page, sites
from project.provocations.buckets import SECRETS
from weightwire import errors
from weightwire.errors import WeightwireError

ENOUGH = 0.85  # of the calls that make an error

# Calls that no provocation reaches, by file and function, each with the reason.
_RACE = "needs another process at the right moment; the tests of the room provoke it"
_GPU = "needs a GPU, or a tensor of more than 4 billion units"
_SGLANG = "runs inside SGLang; tests/engines/sglang provokes it"
_VLLM = "runs inside vLLM; tests/engines/vllm provokes it in a real server"
_LIBRARY = "needs a library, a store or the disk to break its contract"
_SIGNAL = "needs an interrupt at the right moment; the tests of the room send one"
_ANSWER = "answers an HTTP client; tests/server provokes it"
_FOLLOWING = "a follower that is running reports it as a warning, and raises nothing"
UNPROVOKED = {
    "bucket/concurrency.py: pieces": _SIGNAL,
    "bucket/huggingface.py: HuggingFaceBucket._download": _LIBRARY,
    "bucket/huggingface.py: _fill": _LIBRARY,
    "bucket/huggingface.py: _explain": "huggingface_hub reads HF_HUB_OFFLINE when it is imported",
    "bucket/object_store.py: ObjectStoreBucket.read_into": "only for a buffer without bytes",
    "bucket/object_store.py: ObjectStoreBucket.get": _LIBRARY,
    "bucket/object_store.py: ObjectStoreBucket._failing": _LIBRARY,
    "bucket/object_store.py: ObjectStoreBucket._read": _LIBRARY,
    "bucket/object_store.py: _from_profile": "needs boto3 with a broken configuration",
    "bucket/probe.py: _at_once": _RACE,
    "catchup/detour.py: _explain": _RACE,
    "catchup/remote_file.py: RemoteFile.open": "no command reads parts of a file; tests/catchup does",
    "chain/keys.py: _public_keys": "tests/chain/test_keys.py has it",
    "delta/file.py: head_size": "only for a file that is damaged while its head is read; tests/catchup has it",
    "engines/live_model.py: _state_of": "patches always have digests",
    "page/heat_reader.py: HeatReader._up_to": "the heat map leaves a gap instead",
    "replica/current_refresh.py: CurrentRefresh._apply": _RACE,
    "catchup/fetch.py: missing_side_file": _RACE,
    "catchup/fetch.py: _open_spooled.read": _LIBRARY,
    "chain/reader.py: ChainReader.run_hash": _RACE,
    "cli/publish/checkpoint_candidate.py: _check_is_one_model": "the tests of `publish` provoke it",
    "cli/publish/checkpoint_watch.py: CheckpointWatch.__init__": "the tests of `publish` provoke it",
    "cli/restore.py: _Work._write": _LIBRARY,
    "cli/serve.py: _update_to": "needs a server; the tests of `serve` provoke it",
    "delta/decoder.py: jobs_of": "only for a crafted file; tests/delta/test_malformed_files.py provokes it",
    "engines/adapter_module.py: AdapterModule._tensors": "for adapters whose weights PEFT computes when it saves them",
    "engines/engine_monitor.py: EngineMonitor._check": _FOLLOWING,
    "engines/engine_monitor.py: _note_silence": _FOLLOWING,
    "engines/engine_monitor.py: _note_service": _FOLLOWING,
    "engines/weight_writes.py: _HostWrite.check": _RACE,
    "engines/weight_writes.py: _DeviceWrite.check": _GPU,
    "engines/order_desk.py: PatchDesk.swap": "runs inside a server; tests/engines provokes it",
    "engines/shared_directory.py: SharedDirectory._session_lock": _RACE,
    "engines/sglang/loader.py: _SglangWorker._note_reload": _SGLANG,
    "engines/sglang/loader.py: _SglangWorker._check_whole": _SGLANG,
    "engines/relaid_model.py: RelaidModel._find_again": "runs inside a server; tests/engines provokes it",
    "engines/relaid_model.py: _check_targets": "for schemes of vLLM; tests/engines provokes it",
    "engines/torch.py: TorchEngine._check": "only for loaders that change weights; tests/engines provokes it",
    "engines/version_keeper.py: Keeper._each": _FOLLOWING,
    "engines/version_keeper.py: Keeper._carefully": _FOLLOWING,
    "engines/vllm/model_with_draft.py: ModelWithDraft._learn_draft": _VLLM,
    "engines/vllm/model_desk.py: ModelDesk._stage": _VLLM,
    "engines/vllm/model_desk.py: ModelDesk._check_whole": _VLLM,
    "engines/vllm/model_desk.py: ModelDesk._check_quantization": _VLLM,
    "engines/vllm/quantization_scheme.py: check_same_scheme": _VLLM,
    "follower/run_position.py: RunPosition._check_trusted": "the proof of run.json mostly fails first",
    "follower/follow_loop.py: FollowLoop._look_once": _FOLLOWING,
    "follower/follow_loop.py: FollowLoop._note": _FOLLOWING,
    "follower/follower.py: Follower._check_holding": _RACE,
    "follower/run_position.py: RunPosition.check_history": _RACE,
    "publisher/ranks/turns.py: RankTurns.offer": _SIGNAL,
    "publisher/ranks/turns.py: _interrupted": _SIGNAL,
    "publisher/takeover.py: _read": _RACE,
    "publisher/takeover.py: _finish_dropped": _SIGNAL,
    "replica/workdir.py: Workdir._replay": _LIBRARY,
    "server/engine_routes.py: _EngineRoutes.refuse_push": _ANSWER,
    "server/model_loader.py: _tokenizer": "needs a model; tests/server provokes it",
    "server/refusal.py: bad_request": _ANSWER,
    "server/routes.py: Routes._ready": _ANSWER,
    "server/routes.py: _all_parts": _ANSWER,
    "server/routes.py: _body": _ANSWER,
    "server/routes.py: _unless_gone": _ANSWER,
    "server/service.py: CompletionService.check_model": _ANSWER,
    "trainers/process_group.py: _serve": _RACE,
}

# Errors for which there is nothing to advise.
WITHOUT_HINT: dict[str, str] = {}

# Messages that name no place: they are about the one object that the caller holds.
ABOUT_THE_CALLER = ("this ", "out of memory", "nothing has been published yet")

# How a message may begin in upper case: names of settings, of dtypes, and of errors of stores.
_PROPER = re.compile(r"AWS_|[A-Z]+\d|[A-Z][a-z]+[A-Z]|Generic S3 error")
_STRERROR = {os.strerror(number) for number in range(1, 134)}
_BANNED = re.compile(
    r"\bis n[o] |\bare no (?!longer)|\bane[w]\b|all the sam[e]|\bwho\b|\bwhom\b|whoever|whatever|"
    r"\bbe it\b|at hand|as it stands|\bsay\b|\btell|\btold\b|of its own|of their own|\btoo$|\ba int\b"
)
_THINGS = "base|delta|demo|engine|example|model|page|patch|publisher|ranks?|server|temporary file|torch|version|weights"
_PLACE = re.compile(r"^((?:\w+://|~?/|')\S*?|\S+\.\w+|\w+://\S+|delta|rank \d+|side file \S+): ")


pytestmark = pytest.mark.slow  # provokes every error, half a minute


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    found = Catalogue(tmp_path_factory.mktemp("errors"))
    found.collect()
    return found


def statement(message: str) -> str:
    """A message without the places in front of it: a path, and perhaps a tensor and a block."""
    before = None
    while before != message:
        before = message
        message = _PLACE.sub("", message)
        message = re.sub(r"^(?:tensors?|parameter|block|step) (?:'[^']*'(?: and '[^']*')?|\d+): ", "", message)
    return message


def complaints(one: Provoked) -> list[str]:
    """What is wrong with the text of an error."""
    said = statement(one.message)
    system = any(said.startswith(text) for text in _STRERROR)
    has_thing = re.search(rf"[/'\d_]|\b(?:{_THINGS})\b", one.message)
    return [
        what
        for what, wrong in {
            "has no hint": not one.hint and one.error.code not in WITHOUT_HINT,
            "begins in upper case": said[:1].isupper() and not system and not _PROPER.match(said),
            "hint begins in upper case": one.hint[:1].isupper(),
            "ends in a period": one.message.endswith(".") or one.hint.endswith("."),
            "has several lines": "\n" in one.message + one.hint,
            "uses a banned phrase": _BANNED.search(f"{one.message}\n{one.hint}"),
            "names neither a place nor a thing": not has_thing and not one.message.startswith(ABOUT_THE_CALLER),
            "shows a secret": any(secret in f"{one.message}{one.hint}" for secret in SECRETS),
        }.items()
        if wrong
    ]


def test_every_provocation_raises_an_error(catalogue: Catalogue) -> None:
    assert not catalogue.silent


def test_every_error_class_is_provoked(catalogue: Catalogue) -> None:
    provoked = {type(one.error) for one in catalogue.provoked}
    listed = {getattr(errors, name) for name in errors.__all__}
    assert not {kind.__name__ for kind in listed - provoked}


def test_every_error_has_a_code_of_the_list(catalogue: Catalogue) -> None:
    codes = {getattr(errors, name).code for name in errors.__all__}
    assert {one.error.code for one in catalogue.provoked} == codes


def test_only_internal_errors_are_of_the_base_class(catalogue: Catalogue) -> None:
    plain = {one.message for one in catalogue.provoked if type(one.error) is WeightwireError}
    assert all("failed" in message for message in plain)


def test_every_message_reads_well(catalogue: Catalogue) -> None:
    found = {f"{one.message}\nhint: {one.hint}": complaints(one) for one in catalogue.provoked}
    assert not {text: wrong for text, wrong in found.items() if wrong}


def test_every_call_that_makes_an_error_is_provoked_or_excused(catalogue: Catalogue) -> None:
    unprovoked = {site.name for site in catalogue.unprovoked()}
    unexcused, needless = unprovoked - UNPROVOKED.keys(), UNPROVOKED.keys() - unprovoked
    assert not unexcused, "add a provocation, or a reason to UNPROVOKED"
    assert not needless, "provoked by now: remove it from UNPROVOKED"
    assert len(catalogue.unprovoked()) <= (1 - ENOUGH) * len(sites())


def test_the_page_lists_all_provoked_errors(catalogue: Catalogue) -> None:
    """After a change of a message: `python tests/project/error_catalogue.py` writes the page again."""
    assert PAGE.read_text(encoding="utf-8") == page(catalogue.provoked)


@pytest.mark.parametrize(
    ("message", "hint", "complaint"),
    [
        ("/a: is empty", "", "has no hint"),
        ("/a: Is empty", "copy it", "begins in upper case"),
        ("/a: is empty", "Copy it", "hint begins in upper case"),
        ("/a: is empty.", "copy it", "ends in a period"),
        ("/a: whoever wrote it", "copy it", "uses a banned phrase"),
        ("it failed", "try again", "names neither a place nor a thing"),
        (f"/a: the key is {SECRETS[0]}", "try again", "shows a secret"),
        ("/a: Permission denied", "check the owner", None),
        ("s3://bucket/a: NoSuchBucket, it does not exist", "create it", None),
        ("/a: tensor 'w': block 3: is empty", "copy it", None),
    ],
)
def test_complaints_are_found_in_bad_texts(message: str, hint: str, complaint: str | None) -> None:
    one = Provoked("test", errors.CheckpointError(message, hint=hint), message, hint)
    assert complaints(one) == ([complaint] if complaint else [])


def test_calls_that_make_errors_are_found_in_the_source() -> None:
    """The scan finds classes outside of errors.py, and functions that take a hint."""
    assert {"TornCheckpoint", "ServerRefusal", "NoPath", "Refusal"} <= error_names()
    names = {site.name for site in sites()}
    assert {"weights/tensor.py: refuse", "delta/file.py: Delta.corrupt", "chain/rules.py: missing_commit"} <= names
    assert all(Path(site.file).suffix == ".py" for site in sites())
