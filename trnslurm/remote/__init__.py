"""Run commands on another host by ssh, with a copy of the launcher that is sent along."""
