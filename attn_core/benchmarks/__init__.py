"""What `attn_core.benchmark` is made of: cases, contenders, measurements, reports."""
