"""Parts of the plugin `grpo`."""
