"""Who serves: what keeps an engine's live weights at the version that a follower holds.

    mapping     where each weight of a checkpoint lies in a running model, learnt from the model's own loader
    runtime     a running model's weights: patched in place, proven, put back if anything is wrong
    port        what an engine offers, wherever it runs
    keeping     one follower, any number of engines: stage, swap, reload
    torch       the engine for a torch module in this process
    vllm        the engine for a vLLM server on this machine

Nothing here is imported unless it is asked for: torch is, by `mapping` and `runtime`.
"""
