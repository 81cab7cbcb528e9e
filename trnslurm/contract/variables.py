"""The variables that a run's processes pass to each other, and those that set a user's defaults.

The templates write out the names for readers of the scripts. A test compares them with these.
"""

from __future__ import annotations

from trnslurm.contract.meant import Meant


class Variable(Meant):
    """The name of a variable and its meaning."""

    # For a job: set by its batch script for everything that it starts.
    RUN_DIR = "TRNSLURM_RUN_DIR", "the run's directory"
    PHASE = "TRNSLURM_PHASE", "precompile, train or prepare; for a server, its role"
    ATTEMPT = "TRNSLURM_ATTEMPT", "the number of this start of the phase, from 1"
    DEVICE = "TRNSLURM_DEVICE", "the device for which the job was rendered"
    PYTHON = "TRNSLURM_PYTHON", "the job's Python interpreter"
    DEFAULT_PYTHON = (
        "TRNSLURM_DEFAULT_PYTHON",
        "the default of TRNSLURM_PYTHON on the local cluster",
    )
    JOB = "TRNSLURM_JOB", "the job's ID; for a step of another job, JOB.STEP"
    RESTARTS = "TRNSLURM_RESTARTS", "how many times Slurm has restarted the job"
    STARTED = "TRNSLURM_STARTED", "when the attempt started"
    DOING = "TRNSLURM_DOING", "what the batch script is doing, as the reason for a failure"
    FILES = (
        "TRNSLURM_FILES",
        "the directory of the files for this node count, in a job with a range",
    )
    HOSTS = "TRNSLURM_HOSTS", "the nodes of the attempt, separated by commas"
    ALLOCATION = "TRNSLURM_ALLOCATION", "the nodes of the job, including spares"
    CHOSEN = "TRNSLURM_CHOSEN", "the nodes chosen for the next attempt"
    PORTS = "TRNSLURM_PORTS", "two free ports on the first node"
    DEVICE_PORT = (
        "TRNSLURM_DEVICE_PORT",
        "the second of these ports, for the device's own rendezvous",
    )
    STEP = "TRNSLURM_STEP", "the step's number, inside a job that the user holds"
    TASK = "TRNSLURM_TASK", "JOB_N for a task of a job array"
    TAKEN = (
        "TRNSLURM_TAKEN",
        "the run that a task of a job array continues, in a later rung of a sweep",
    )
    GIVEN = "TRNSLURM_GIVEN", "the environment of the submitting shell, for a batch script"
    LOCAL = "TRNSLURM_LOCAL", "the directory of TorchNeuron's own files on a node's disk"
    INSIDE = "TRNSLURM_INSIDE", "the command that enters the container"
    VERSIONS = "TRNSLURM_VERSIONS", "the packages in the container's image"
    ARCHIVE = "TRNSLURM_ARCHIVE", "the packed environment that each node unpacks"
    # For checkpoints and graphs.
    CHECKPOINTS = "TRNSLURM_CHECKPOINTS", "where a custom script saves"
    CHECKPOINT_GLOB = "TRNSLURM_CHECKPOINT_GLOB", "a pattern for the checkpoints of a custom script"
    RESUME = "TRNSLURM_RESUME", "the newest complete checkpoint; empty if there is none"
    RESUMES = (
        "TRNSLURM_RESUMES",
        "how a custom script finds its checkpoint: told (by {resume}), added (submit added "
        "{resume}), looks (by itself)",
    )
    FOLLOWED = "TRNSLURM_FOLLOWED", "the checkpoint of another run that this run follows"
    FOLLOWED_STEP = "TRNSLURM_FOLLOWED_STEP", "the step of that checkpoint"
    OUT = "TRNSLURM_OUT", "where a custom script writes results for other runs"
    INPUTS = "TRNSLURM_INPUTS", "the bash lines that set the variables of inputs from other runs"
    INPUT = "TRNSLURM_INPUT", "the prefix of an input's variables: TRNSLURM_INPUT_NAME_CHECKPOINT"
    EXPORT = "TRNSLURM_EXPORT", "the Hugging Face folder made from that checkpoint"
    CACHE = "TRNSLURM_CACHE", "the compile cache"
    CACHE_LAYOUT = "TRNSLURM_CACHE_LAYOUT", "one cache for all hosts, or one per host"
    CACHE_TRUST = (
        "TRNSLURM_CACHE_TRUST",
        "users whose graphs are trusted, in addition to you and root",
    )
    GRAPH_KEY = "TRNSLURM_GRAPH_KEY", "the key of the job's graphs"
    COMPILE_CACHE = "TRNSLURM_COMPILE_CACHE", "the graphs of xla-cpu"
    # For the servers of roles.
    SERVERS = "TRNSLURM_SERVERS", "the nodes of each role: ROLE=NODE,NODE …"
    APART = "TRNSLURM_APART", "the nodes of a job component in another partition"
    OF_DEVICE = "TRNSLURM_OF_DEVICE", "the variables that are set only on the training nodes"
    SERVER = "TRNSLURM_SERVER", "this server's number within its role"
    OF_ROLE = "TRNSLURM_ROLE", "the prefix of a role's variables: TRNSLURM_ROLE_NAME_URLS"
    HOST = "TRNSLURM_HOST", "the address of this server's node"
    PORT = "TRNSLURM_PORT", "the port on which this server must listen"
    # For one node, and for the next attempt.
    NODE = "TRNSLURM_NODE", "the node's rank"
    COMMAND = "TRNSLURM_COMMAND", "the command for a node, in node.sh"
    PROFILE = (
        "TRNSLURM_PROFILE",
        "the step after which worker 0 starts recording, and the number of steps",
    )
    BEATS = "TRNSLURM_BEATS", "the address to which a node sends its heartbeats"
    OTHERS = (
        "TRNSLURM_OTHERS",
        "for worker 0, the descriptor that closes when all others have ended",
    )
    GATE = "TRNSLURM_GATE", "where standby workers wait"
    ASKED = (
        "TRNSLURM_ASKED",
        "the descriptor to which the script writes the command that it would start",
    )
    STANDBY = "TRNSLURM_STANDBY", "the number of the next attempt, whose workers are waiting"
    EVENT = "TRNSLURM_EVENT", "for a notification command, the event"
    STAND_IN_DEVICE = "TRNSLURM_STAND_IN_DEVICE", "what `doctor --run` trains on without devices"
    # For users of the command line.
    PATH = "TRNSLURM_PATH", "directories with jobs/, cluster-config/ and templates/"
    CLUSTER = "TRNSLURM_CLUSTER", "the default of --cluster"
    SITE = (
        "TRNSLURM_SITE",
        "a file of locks to try, in addition to /etc/trnslurm/site.yaml",
    )
    ON = "TRNSLURM_ON", "the default of --on"
    SSH = "TRNSLURM_SSH", "the command to use instead of ssh"
    LOGIN = "TRNSLURM_LOGIN", "set on the other host after its login files are read"
    SANDBOX = "TRNSLURM_SANDBOX", "the sandbox that this shell belongs to"
    SANDBOXES = "TRNSLURM_SANDBOXES", "the directory of all sandboxes"
    SANDBOX_SLURM = "TRNSLURM_SANDBOX_SLURM", "the directory of the Slurm that a new sandbox starts"
