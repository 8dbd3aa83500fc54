"""Generate: a small completion server for one model, whose weights follow a run while it serves.

    completion_request    requests in OpenAI's format: which fields are honoured, and which are refused
    completion_answer     answers in that format, whole or as chunks of a stream
    refusal               the errors that a client sees
    api_reply             replies as JSON
    chat_template         a chat as text
    sequence              a sequence: what is asked for, and what has been generated
    sampling              chooses the next token
    generation            sequences generated together, token by token, each token with its version
    batcher               the thread that generates; new sequences join at the next token
    text_stream           the text of a growing sequence
    completion_stream     the choices of a request while they are generated
    model_loader          a checkpoint directory -> a module and its tokenizer
    service               completions and weights, once a model is loaded
    routes                the HTTP routes
    engine_routes         the HTTP routes of vLLM that trainers call
    event_stream          server-sent events
    http_listener         a socket and uvicorn

Imported on demand, because it needs torch, transformers, starlette and uvicorn. It is made for small models and
experiments. Use vLLM for large models.
"""
