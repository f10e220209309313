"""`optimum-cli export cpu-accel`: what `hf-cpu-accel pack` does, with the arguments of optimum's other exports."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo


class CPUAccelExportCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="cpu-accel", help="Pack a model for fast inference on CPUs with hf_cpu_accel.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        # Run whenever `optimum-cli` starts, so that nothing is imported here to know what is accepted: `run` says that.
        required = parser.add_argument_group("Required arguments")
        required.add_argument(
            "-m", "--model", required=True, help="Model ID on huggingface.co or path on disk to load from."
        )
        required.add_argument("output", type=Path, help="The folder to write.")
        optional = parser.add_argument_group("Optional arguments")
        optional.add_argument(
            "--dtype",
            default="auto",
            help="Of the packed weights: auto, float32, bfloat16, int8, int8-weight or int4. Defaults to auto.",
        )
        optional.add_argument(
            "--int4-group",
            type=int,
            default=32,
            help="Input features of an int4 weight that share a multiplier: 32, 64 or 128. Defaults to 32.",
        )
        optional.add_argument("--threads", type=int, help="Threads to pack with.")

    def run(self) -> None:
        import typer

        from hf_cpu_accel.cli.pack import pack

        given = self.args
        try:
            pack(
                given.model,
                given.output,
                dtype=given.dtype,
                int4_group=given.int4_group,
                threads=given.threads,
            )
        except typer.BadParameter as error:
            self.parser.error(error.message)
        except typer.Exit as done:
            raise SystemExit(done.exit_code) from done
