"""Exact numbers of tiny models, to which any trainer can be held at any layout.

python -m conformance.run --adapter conformance.adapters.megatron:Adapter --layout tensor=2,data=2
"""
