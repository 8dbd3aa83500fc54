"""Wrong versions of what is shared by servers with workers, and of SGLang's engine."""

from __future__ import annotations

from mutants.mutant import mutant

_ORDERS = "engines/worker_orders.py"
_ENGINE, _LOADER = "engines/sglang/sglang_engine.py", "engines/sglang/loader.py"
_ENGINE_TESTS, _LOADER_TESTS = "engines/sglang/test_sglang_engine.py", "engines/sglang/test_loader.py"

SGLANG_MUTANTS = [
    mutant(
        "ranks not restored",
        "if a worker fails, all workers restore the version before",
        _ENGINE_TESTS,
        (
            "engines/worker_orders.py",
            '            self.order("undo", None, target)',
            '            target.run  # "undo"',
        ),
    ),
    mutant(
        "mixture forgotten by a question",
        "an order that only reads does not make a mixture whole",
        _ENGINE_TESTS,
        (_ORDERS, "self.mixed or action in _WRITING", "action in _WRITING"),
    ),
    mutant(
        "mixture served by SGLang",
        "a server whose weights may be a mixture stays paused",
        _ENGINE_TESTS,
        (
            _ENGINE,
            "        if not self._orders.mixed:\n            self._resume(mode)\n",
            "        self._resume(mode)\n",
        ),
    ),
    mutant(
        "half-loaded checkpoint served",
        "a checkpoint that SGLang loaded only in part is not served",
        _ENGINE_TESTS,
        (_ENGINE, "if not self._orders.mixed and not was_paused:", "if not was_paused:"),
    ),
    mutant(
        "worker trusted while SGLang loads",
        "a restarted follower knows that a checkpoint was being loaded",
        _LOADER_TESTS,
        (_LOADER, "        self._live.holding, self._live.mixed = None, True\n", "        pass\n"),
    ),
    mutant(
        "old cache after a swap",
        "the cache of old weights is flushed",
        _ENGINE_TESTS,
        (_ENGINE, '        if mode == "retract":\n            self._flush()\n', ""),
    ),
    mutant(
        "old cache after a kill",
        "the cache is flushed if a follower was killed in a pause",
        _ENGINE_TESTS,
        (_ENGINE, '        if was_paused:\n            mode = "retract"\n', ""),
    ),
    mutant(
        "server paused for ever",
        "a mixture that turns out to be whole is served",
        _ENGINE_TESTS,
        (_ENGINE, "        if self._shared.paused_mark.exists():  # it was a mixture before\n", "        if False:\n"),
    ),
    mutant(
        "computed weights left behind",
        "a model with tensors that were computed from weights is reloaded",
        _LOADER_TESTS,
        (_LOADER, "self._desk.unpatchable = _computed_weights(model)", 'self._desk.unpatchable = ""'),
    ),
    mutant(
        "wrong load believed",
        "what SGLang loaded is compared, if weights were ever found as loaded",
        _LOADER_TESTS,
        (_LOADER, "            if self._is_plain:\n", "            if False:\n"),
    ),
    mutant(
        "loader escapes with threads",
        "learning where weights are never writes into the running model",
        _LOADER_TESTS,
        ("engines/scratch_layout.py", "            if storage is None:\n", "            if True:\n"),
    ),
    mutant(
        "foreign patch swapped",
        "only a patch that was staged for this version is swapped in",
        _LOADER_TESTS,
        (
            "engines/order_desk.py",
            "staged is None or (self._owner, staged.target) != (order.directory, order.target):",
            "staged is None:",
        ),
    ),
]
