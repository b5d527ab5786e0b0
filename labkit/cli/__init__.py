"""The subcommands of `python -m labkit`, one file each. What is heavy is imported only when a command runs."""
