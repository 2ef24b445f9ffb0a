"""The command `billfish`: one file for each subcommand."""
