"""Parts of the `lora` plugin."""
