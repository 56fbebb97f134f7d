"""Checks before any process is launched, one file per subject.

``job.check`` calls all checks, ``settings.check_settings`` the ones without rows or a model.
"""
