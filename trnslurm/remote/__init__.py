"""Commands on a cluster from elsewhere: by ssh, with a copy of the launcher that comes along."""
