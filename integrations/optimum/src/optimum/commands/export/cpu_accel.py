"""`optimum-cli export cpu-accel`: `hf-cpu-accel pack` with the arguments of the other exports of optimum."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo


class CPUAccelExportCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="cpu-accel", help="Pack a model for fast inference on CPUs with hf_cpu_accel.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        # Runs whenever `optimum-cli` starts, so it imports nothing; `run` checks the values.
        required = parser.add_argument_group("Required arguments")
        required.add_argument(
            "-m", "--model", required=True, help="Model ID on huggingface.co or path on disk to load from."
        )
        required.add_argument("output", type=Path, help="Folder to write.")
        optional = parser.add_argument_group("Optional arguments")
        optional.add_argument(
            "--dtype",
            default="auto",
            help="dtype of the packed weights: auto, float32, bfloat16, int8, int8-weight or int4. Defaults to auto.",
        )
        optional.add_argument(
            "--int4-group",
            type=int,
            default=32,
            help="Group size of int4: input features that share a scale; 32, 64 or 128. Defaults to 32.",
        )
        optional.add_argument("--threads", type=int, help="Number of threads to pack with.")

    def run(self) -> None:
        import typer

        from hf_cpu_accel.cli.pack import pack

        arguments = self.args
        try:
            pack(
                arguments.model,
                arguments.output,
                dtype=arguments.dtype,
                int4_group=arguments.int4_group,
                threads=arguments.threads,
            )
        except typer.BadParameter as error:
            self.parser.error(error.message)
        except typer.Exit as error:
            raise SystemExit(error.exit_code) from error
