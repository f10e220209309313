"""Registers the command; `optimum-cli` imports this file when it starts."""

from optimum.commands.export.base import ExportCommand
from optimum.commands.export.cpu_accel import CPUAccelExportCommand

REGISTER_COMMANDS = [(CPUAccelExportCommand, ExportCommand)]
