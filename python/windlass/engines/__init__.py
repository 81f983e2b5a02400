"""Engines that Windlass loads: vLLM, SGLang, engines behind HTTP, and those that Ray runs.

``windlass.vllm``, ``windlass.sglang`` and ``windlass.ray`` are the names to write in flags and programs.
"""
