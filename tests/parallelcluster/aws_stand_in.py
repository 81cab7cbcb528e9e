"""Moto's server of AWS's protocols, with what `pcluster create-cluster --dryrun` asks for.

    .venv-pcluster/bin/python tests/parallelcluster/aws_stand_in.py PORT

Two things differ from moto 5.2: block devices need no size (EC2 takes the image's, and a node's own
disks have none), and there is DescribeCapacityReservations.
"""

import sys

from moto.core.responses import ActionResult
from moto.ec2.responses.instances import InstanceResponse
from moto.server import main

BLOCK = "cr-0dddddddddddddddd"


def _describe_capacity_reservations(self):
    """Return a capacity block of 16 instances, of the type that its region has here."""
    kind = "trn2.48xlarge" if self.region == "us-east-2" else "trn1.32xlarge"
    found = {
        "CapacityReservationId": BLOCK, "InstanceType": kind, "State": "active",
        "AvailabilityZone": f"{self.region}a", "TotalInstanceCount": 16,
        "AvailableInstanceCount": 16, "ReservationType": "capacity-block", "Tenancy": "default",
        "InstancePlatform": "Linux/UNIX",
    }  # fmt: skip
    return ActionResult({"CapacityReservations": [found]})


if __name__ == "__main__":
    InstanceResponse._validate_block_device_mapping = staticmethod(lambda mapping: None)
    InstanceResponse.describe_capacity_reservations = _describe_capacity_reservations
    main(["-p", sys.argv[1]])
