"""Generate: a small completion server for one model, whose weights follow a run while it serves.

    completion_api    OpenAI's completions as clients write and read them
    generation        sequences generated together, token by token, each token with its version
    batcher           the thread that generates; who waits joins at the next token
    model_loader      a checkpoint directory -> a module and its tokenizer
    service           what can be asked once a model is there
    routes            the routes
    listener          a socket and uvicorn

Nothing here is imported unless it is asked for: torch, transformers, starlette and uvicorn are. It is made for small
models and for trying things out; for large ones there is vLLM.
"""
