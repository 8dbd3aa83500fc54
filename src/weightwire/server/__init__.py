"""Who generates: a small completion server for one model, whose weights follow a run while it serves.

    wire        OpenAI's completions as clients write and read them
    generation  sequences generated together, token by token, each token with its version
    batching    the thread that generates; who waits joins at the next token
    loading     a checkpoint directory -> a module and its tokenizer
    service     what can be asked once a model is there
    app         the routes
    listening   a socket and uvicorn

Nothing here is imported unless it is asked for: torch, transformers, starlette and uvicorn are. It is made for small
models and for trying things out; for large ones there is vLLM.
"""
