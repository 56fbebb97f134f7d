"""Refusals before any process is launched, a file for each subject.

``job.check`` calls all, ``settings.check_settings`` those that need neither rows nor a model.
"""
