"""What the shipped cluster files name, made in moto's account, with the IDs that it gets there.

python aws_account.py                          images, before the server starts: amis.json
python aws_account.py REGION '{"key": "rsa"}'  key pair, subnets, bucket and more: made.json
"""

import json
import sys
from pathlib import Path

import boto3

IMAGE, PARENT, ARM = "ami-0123456789abcdef0", "ami-0eeeeeeeeeeeeeeee", "ami-0aaaaaaaaaaaaaaa1"
BUCKET, KEY = "replace-me-bucket", "replace-me-key"
VERSION, SYSTEM = "3.16.1", "ubuntu2404"


def images():
    """Return ParallelCluster's own images of two architectures, and one that it has built."""
    official = f"aws-parallelcluster-{VERSION}-ubuntu-2404-lts-hvm-%s-202601010000 2026-01-01"
    common = {
        "state": "available", "public": True, "sriov": "simple", "root_device_type": "ebs",
        "root_device_name": "/dev/sda1", "description": "", "image_type": "machine",
        "platform": None, "architecture": "x86_64", "virtualization_type": "hvm",
        "hypervisor": "xen", "image_location": "",
    }  # fmt: skip
    return [
        common | {"ami_id": IMAGE, "name": "neuron", "owner_id": "111122223333"},
        *(
            common
            | {
                "ami_id": image,
                "name": official % kind,
                "owner_id": "247102896272",
                "architecture": kind,
            }
            for image, kind in ((PARENT, "x86_64"), (ARM, "arm64"))
        ),
    ]


def account(region, key="ed25519", tags="all"):
    """Make all that the files name; return the ID of each thing whose ID AWS chooses."""
    ec2, s3 = boto3.client("ec2", region_name=region), boto3.client("s3", region_name=region)
    ec2.delete_key_pair(KeyName=KEY)
    ec2.create_key_pair(KeyName=KEY, KeyType=key)
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    ec2.modify_vpc_attribute(VpcId=vpc, EnableDnsHostnames={"Value": True})
    subnets = [
        ec2.create_subnet(VpcId=vpc, CidrBlock=block, AvailabilityZone=f"{region}a")["Subnet"]
        for block in ("10.0.0.0/24", "10.0.1.0/24")
    ]
    public, private = (subnet["SubnetId"] for subnet in subnets)
    ec2.modify_subnet_attribute(SubnetId=public, MapPublicIpOnLaunch={"Value": True})
    if BUCKET not in {bucket["Name"] for bucket in s3.list_buckets()["Buckets"]}:
        s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": region})
    for script in ("node-setup.sh", "configure-efa-fsx-lustre-client.sh"):
        s3.put_object(Bucket=BUCKET, Key=script, Body=b"#!/bin/bash\n")
    group = ec2.create_security_group(GroupName="own", Description="own", VpcId=vpc)["GroupId"]
    rules = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}]
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=rules)
    ec2.authorize_security_group_egress(GroupId=group, IpPermissions=rules)
    secrets = boto3.client("secretsmanager", region_name=region)
    secret = secrets.create_secret(Name=f"secret-{vpc}", SecretString="secret")["ARN"]
    ec2.create_network_interface(SubnetId=private, Groups=[group])
    lustre = boto3.client("fsx", region_name=region).create_file_system(
        FileSystemType="LUSTRE", StorageCapacity=4800, SubnetIds=[private],
        SecurityGroupIds=[group],
        LustreConfiguration={"DeploymentType": "PERSISTENT_2", "EfaEnabled": True},
    )["FileSystem"]["FileSystemId"]  # fmt: skip
    known = {
        "version": VERSION, "os": SYSTEM, "build_status": "available",
        "bootstrap_file": f"aws-parallelcluster-cookbook-{VERSION}",
    }  # fmt: skip
    named = [{"Key": f"parallelcluster:{name}", "Value": v} for name, v in known.items()]
    change = ec2.create_tags if tags == "all" else ec2.delete_tags
    change(Resources=[IMAGE], Tags=named)
    return {
        "subnet-0aaaaaaaaaaaaaaaa": public,
        "subnet-0bbbbbbbbbbbbbbbb": private,
        "sg-0cccccccccccccccc": group,
        "arn:aws:secretsmanager:us-west-2:111122223333:secret:replace-me": secret,
        "fs-0dddddddddddddddd": lustre,
    }


if len(sys.argv) == 1:
    Path("amis.json").write_text(json.dumps(images()))
else:
    made = account(sys.argv[1], **json.loads(sys.argv[2]))
    Path("made.json").write_text(json.dumps(made))
