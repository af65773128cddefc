"""WasmEdge's RPC service for wasi-nn: `wasmedge --nn-rpc-uri` computes on the daemon's models.

`inferd nnrpc` serves it. Importing this package does not import grpclib.
"""
