# A registry for a team: the nodes of the cluster train, a scheduled job evaluates and reports.

terraform {
  required_version = ">= 1.5"
}

provider "aws" {
  region = "eu-central-1"
}

data "aws_iam_role" "nodes" {
  name = "cluster-nodes"
}

data "aws_iam_role" "evaluation" {
  name = "evaluation"
}

module "registry" {
  source = "../.."

  bucket = "example-team-checkpoints"
  prefix = "team"

  principals = {
    trainer   = [data.aws_iam_role.nodes.arn]
    annotator = [data.aws_iam_role.evaluation.arn]
  }

  tags = { team = "example" }
}

output "registry" {
  value = module.registry.url
}
