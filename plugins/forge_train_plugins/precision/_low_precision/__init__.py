"""Parts of the low-precision plugins: `fp8`, `deepseek_fp8`, `mxfp8` and `fp4`."""
