"""Runs commands on another host over ssh, using a copy of the launcher that is sent along."""
