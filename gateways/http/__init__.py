"""The HTTP gateway, by which programs with the API of OpenAI, Anthropic or Ollama use the models,
and those with the Open Inference Protocol the graphs.

`inferd gateway` serves it. Importing this package does not import uvicorn.

- `turns/` runs the turns of any API on pooled connections to the daemon.
- `callers.py` and `heads.py` decide who may send a request: keys, hosts, origins.
- `exchange/` reads one request and writes its response, whole or streamed.
- `fields.py` checks the fields of requests by one table for each path.
- each API is a package of its own: `openai/`, `anthropic/`, `ollama/`, `open_inference/`, and the
  daemon's own, `inferd_api/`.
"""
