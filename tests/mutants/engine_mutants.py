"""Wrong versions of what is known about engines: checks, readiness, shared memory."""

from __future__ import annotations

from mutants.mutant import mutant

_MONITOR, _KEEPER, _READY = "engines/engine_monitor.py", "engines/version_keeper.py", "engines/ready_check.py"
_SHARED, _CLIENT = "engines/shared_directory.py", "engines/vllm/client.py"
_SESSION, _DRAFT_ENGINE = "engines/vllm/update_session.py", "engines/vllm/draft_engine.py"
_OF_DRAFTS = "engines/vllm/test_draft_engine.py"
_CHECKS = "engines/test_engine_monitor.py engines/test_version_keeper.py"
_READINESS = "engines/test_ready_check.py"
_RELAID, _BOTH, _DRAFTS = "engines/relaid_model.py", "engines/vllm/model_with_draft.py", "engines/vllm/drafts.py"
_WITH_DRAFT = "engines/vllm/test_model_with_draft.py"
_COMMAND = "cli/test_follow_ready.py"
_MEMORY = "engines/test_shared_directory.py system/test_durable_files.py"

ENGINE_MUTANTS = [
    mutant(
        "restart unnoticed",
        "an engine that no longer reports its version does not serve it",
        _CHECKS,
        (_MONITOR, "record.version is not None and health.version != record.version:", "False:"),
    ),
    mutant(
        "sleep not reported",
        "an engine that sleeps is not ready",
        _CHECKS,
        (_MONITOR, "        record.health_problem = asleep(name)\n", ""),
    ),
    mutant(
        "slept weights trusted",
        "the weights of an engine that slept are compared before they count",
        _CHECKS,
        (_MONITOR, "record.is_asleep = record.must_verify = True", "record.is_asleep = True"),
    ),
    mutant(
        "slept weights not compared",
        "the weights of an engine that slept are compared, whatever it reports",
        _COMMAND,
        (_KEEPER, "                held = None  # compare all weights\n", "                pass\n"),
    ),
    mutant(
        "sleeping engine updated",
        "a sleeping engine is not updated",
        _CHECKS,
        (_MONITOR, "return not self.is_gone(engine) and not self._records[engine.name].is_asleep", "return True"),
    ),
    mutant(
        "pause of an update is trouble",
        "the pause of an update is not a sleep",
        _CHECKS,
        (_MONITOR, "is_idle = not was_working and not record.is_working and", "is_idle ="),
    ),
    mutant(
        "failed update taken for a sleep",
        "an engine that a failed update left paused is reloaded",
        "engines/vllm/test_health_check.py",
        (_CLIENT, "if health.is_asleep and self._shared.paused_mark.exists():", "if False:"),
    ),
    mutant(
        "hanging engine waited for",
        "nobody waits for an engine that does not answer",
        _COMMAND,
        (_KEEPER, "if not self._monitor.is_gone(one)]", "]"),
    ),
    mutant(
        "version of another run served",
        "an engine that serves another run serves no version of this one",
        _CHECKS,
        (_KEEPER, "if held and position and held.run == position.run else None", "if held else None"),
    ),
    mutant(
        "sleeping engine of once accepted",
        "`follow --once` fails if an engine does not generate",
        _COMMAND,
        (_KEEPER, "            self._monitor.check_now()\n", "            pass\n"),
        (_SESSION, "            raise asleep(name)  # its weights may not be in memory\n", "            pass\n"),
    ),
    mutant(
        "trouble is ready",
        "an engine in trouble is not ready",
        _READINESS,
        (_READY, "        if status.trouble:\n            yield status.trouble\n", ""),
    ),
    mutant(
        "engine without a version is ready",
        "an engine is not ready before its first version",
        _READINESS,
        (_READY, "        if behind is None:\n", "        if False:\n"),
        (
            _READY,
            "        elif most is not None and behind > most:\n",
            "        elif most is not None and (behind or 0) > most:\n",
        ),
    ),
    mutant(
        "max-behind ignored",
        "an engine more than --max-behind versions behind is not ready",
        _READINESS,
        (_READY, "elif most is not None and behind > most:", "elif False:"),
    ),
    mutant(
        "max-lag ignored",
        "an engine behind for longer than --max-lag is not ready",
        _READINESS,
        (_READY, "if longest is not None and lag > longest:", "if False:"),
    ),
    mutant(
        "outage of the bucket not counted",
        "the time in which the bucket cannot be read counts as lag",
        _READINESS,
        (_READY, "lag = max(outage, self._lag(served))", "lag = self._lag(served)"),
    ),
    mutant(
        "reasons for strangers",
        "requests without the token get no reasons",
        "follower/test_wakeups.py",
        ("follower/wakeups.py", "if request.is_trusted else {}", "if True else {}"),
    ),
    mutant(
        "public paths for every method",
        "only GET needs no token",
        "follower/test_wakeups.py",
        (
            "system/http_server.py",
            'and request.method == "GET" and request.path in self.public',
            "and request.path in self.public",
        ),
    ),
    mutant(
        "directory in shared memory left",
        "nothing is left in shared memory",
        _MEMORY,
        (_SHARED, "                self.path.rmdir()\n", "                pass\n"),
    ),
    mutant(
        "paused mark removed",
        "the mark of a paused server outlives its follower",
        _MEMORY,
        (_SHARED, "            if not (self.path / PAUSED).exists():\n", "            if True:\n"),
        (_SHARED, "if path.name not in (_LOCK, PAUSED):", "if path.name != _LOCK:"),
    ),
    mutant(
        "removed lock taken",
        "a lock on a file that was removed does not count",
        _MEMORY,
        ("system/durable_files.py", "            if _is_at(fd, path):\n", "            if True:\n"),
    ),
    mutant(
        "replaced weights written",
        "weights that were replaced are found again",
        "engines/test_relaid_model.py",
        (_RELAID, "        self._find_again()\n", ""),
    ),
    mutant(
        "draft left at old weights",
        "a patch writes the model and the draft in its checkpoint",
        _WITH_DRAFT,
        (_BOTH, "in own.items() if several}", "in own.items() if False}"),
    ),
    mutant(
        "shared weights written by the draft",
        "weights that a draft shares with the model are the model's",
        _WITH_DRAFT,
        (_BOTH, "if storage_of(copy.target) not in borrowed)", "if True)"),
    ),
    mutant(
        "places of a draft before sharing",
        "a draft is patched where it is after vLLM has shared modules with it",
        _WITH_DRAFT,
        (_BOTH, "layout = shared_model_of(draft)", "layout = relaid_model_of(draft)"),
    ),
    mutant(
        "shared weights missed in the run",
        "the run need not fill what a draft shares with the model",
        _WITH_DRAFT,
        (_RELAID, "if place.is_optional or not borrowed.isdisjoint(place.storages):", "if place.is_optional:"),
    ),
    mutant(
        "draft served without weights of the run",
        "a run that lacks weights of the draft is refused",
        _WITH_DRAFT,
        (_RELAID, "not borrowed.isdisjoint(place.storages):", "borrowed:"),
    ),
    mutant(
        "computed layers of a draft forgotten",
        "what is computed from a draft's weights is computed again",
        _WITH_DRAFT,
        (_BOTH, "*self._draft_layout.recomputations(written)]", "]"),
    ),
    mutant(
        "computed layers of a draft not compared",
        "what is computed from a draft's weights is part of the proof",
        _WITH_DRAFT,
        (_BOTH, "self._layout.is_current() and self._draft_layout.is_current()", "self._layout.is_current()"),
    ),
    mutant(
        "cast draft patched in parts",
        "a draft of which some weights cannot be patched is left alone",
        _WITH_DRAFT,
        (_BOTH, "        if draft.unpatchable:\n", "        if False:\n"),
    ),
    mutant(
        "separate draft patched",
        "a draft of another checkpoint is not patched with the run's weights",
        "engines/vllm/test_drafts.py",
        (_DRAFTS, "return draft.model in (", "return True or draft.model in ("),
    ),
    mutant(
        "any draft taken for MTP layers",
        "only MTP layers are part of the model's checkpoint",
        "engines/vllm/test_drafts.py",
        (_DRAFTS, 'or getattr(speculation, "method", "") != "mtp":', "or False:"),
    ),
    mutant(
        "two updates at once",
        "the followers of a model and of its draft update the server one after the other",
        _OF_DRAFTS,
        (_SESSION, "    with shared.session():\n", "    if True:\n"),
    ),
    mutant(
        "version of a draft reported",
        "the version that a server reports is that of the model that it serves",
        _OF_DRAFTS,
        (_SESSION, '{"weight_version": version} if version else {}', '{"weight_version": version or "1"}'),
    ),
    mutant(
        "pause for the model taken for a sleep of the draft",
        "a draft is not asleep while its server is paused for the model",
        _OF_DRAFTS,
        (_DRAFT_ENGINE, "if health.is_asleep and self._shared.paused_mark.exists():", "if False:"),
    ),
    mutant(
        "draft shares the directory of its model",
        "a model and its draft have a follower each",
        _OF_DRAFTS,
        (_DRAFT_ENGINE, "self._server.port, self.name, DRAFT)", "self._server.port, self.name)"),
    ),
]
