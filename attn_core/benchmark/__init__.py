"""What `attn_core.benchmark.runner` is made of: cases, contenders, measurements, reports."""
