"""Generate: a small completion server for one model, whose weights follow a run while it serves.

    completion_api    the shape of OpenAI's completions: requests and answers
    generation        sequences generated together, token by token, each token with its version
    batcher           the thread that generates; new sequences join at the next token
    model_loader      a checkpoint directory -> a module and its tokenizer
    service           completions and weights, once a model is loaded
    routes            the HTTP routes
    http_listener     a socket and uvicorn

Imported on demand, because it needs torch, transformers, starlette and uvicorn. It is made for small models and
experiments. Use vLLM for large models.
"""
