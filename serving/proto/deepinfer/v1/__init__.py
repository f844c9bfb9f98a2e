"""Protobuf package ``deepinfer.v1``; its modules are generated, see :mod:`serving.proto.build`."""
