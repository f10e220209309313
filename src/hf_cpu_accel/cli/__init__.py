"""The command line tool `hf-cpu-accel`. `main` registers the commands; each command has its own file."""
