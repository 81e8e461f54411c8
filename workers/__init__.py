"""The parts that every GPU process shares: types, messages, models, the KV cache, kernels and sampling."""
