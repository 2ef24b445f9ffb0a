"""The command `billfish`: a file for each subcommand, with its arguments (`add_arguments`) and what it does (`run`)."""
