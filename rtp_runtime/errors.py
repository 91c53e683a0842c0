"""Every error that rtp raises on purpose.

RtpError
├── UsageError (ValueError)         an argument, option or environment variable
│   └── RequestError                one request: prompt, parameters, limits
├── ModelError                      a checkpoint or its config
│   ├── ConfigError                 a config that is missing, unreadable or incomplete
│   ├── UnsupportedModelError       no plugin provides the architecture, or the one that does declines
│   └── CheckpointError             a tensor or file of the checkpoint
├── PluginError                     a plugin that cannot be used
├── KernelError                     no implementation of an op fits
├── StateError                      state that cannot be declared, sized or granted
└── NotJudgedError                  a check that could not be made

A message says what was wrong (the value), what would be right, and what to do next. Commands print it without a
traceback and exit with status 2.
"""

from __future__ import annotations


class RtpError(Exception):
    """Base of all errors that rtp raises on purpose."""


class UsageError(RtpError, ValueError):
    """An argument, option or environment variable that cannot be used."""


class RequestError(UsageError):
    """A request that cannot be served: its prompt, parameters or size."""


class ModelError(RtpError):
    """A checkpoint, or its config, that cannot be used."""


class ConfigError(ModelError):
    """A config that is missing, unreadable or lacks a key that decides a number."""


class UnsupportedModelError(ModelError):
    """No plugin provides the architecture, or the one that does declines this config."""


class CheckpointError(ModelError):
    """A tensor or file of the checkpoint that is missing, unexpected or damaged."""


class PluginError(RtpError):
    """A plugin that cannot be loaded, is outdated, or conflicts with another."""


class KernelError(RtpError):
    """No implementation of an op supports what is asked of it."""


class StateError(RtpError):
    """State that cannot be declared, sized or granted."""


class NotJudgedError(RtpError):
    """A check that could not be made, and why."""
