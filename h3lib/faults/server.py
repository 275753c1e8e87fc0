"""Imported by the fork server alone: it ends with the process that started it, and its ranks with
it, stopped ones too."""

from h3lib.parallel.launch import die_with_parent

die_with_parent()
