# A bucket for a registry, and a policy for each role that works with it.

terraform {
  required_version = ">= 1.5"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.0"
    }
  }
}

data "aws_partition" "current" {}

data "aws_caller_identity" "current" {}

module "policies" {
  source = "./policies"

  bucket      = var.bucket
  prefix      = var.prefix
  kms_key_arn = var.kms_key_arn
  partition   = data.aws_partition.current.partition
  teams       = var.teams
  tags_packs  = var.tags_packs
}

resource "aws_s3_bucket" "registry" {
  bucket = var.bucket
  tags   = var.tags

  lifecycle {
    prevent_destroy = true
  }
}

resource "aws_s3_bucket_ownership_controls" "registry" {
  bucket = aws_s3_bucket.registry.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_public_access_block" "registry" {
  bucket = aws_s3_bucket.registry.id

  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_server_side_encryption_configuration" "registry" {
  bucket = aws_s3_bucket.registry.id

  rule {
    bucket_key_enabled = var.kms_key_arn != null

    apply_server_side_encryption_by_default {
      sse_algorithm     = var.kms_key_arn == null ? "AES256" : "aws:kms"
      kms_master_key_id = var.kms_key_arn
    }
  }
}

resource "aws_s3_bucket_versioning" "registry" {
  bucket = aws_s3_bucket.registry.id

  versioning_configuration {
    status = "Enabled"
  }
}

# Only what no listing shows any more is cleaned up here. No rule may expire or archive CURRENT
# objects: age says nothing about whether a checkpoint is needed. A pack may hold the chunks of
# checkpoints saved years after it, and a log of which one slot is gone cannot be read. What may go is
# known to the collector alone.
resource "aws_s3_bucket_lifecycle_configuration" "registry" {
  bucket = aws_s3_bucket.registry.id

  rule {
    id     = "unfinished-uploads"
    status = "Enabled"
    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 7
    }
  }

  # Versions that were replaced or deleted: for so many days a mistake can be taken back. What a
  # collection deletes takes space until then.
  rule {
    id     = "noncurrent-versions"
    status = "Enabled"
    filter {}

    noncurrent_version_expiration {
      noncurrent_days = var.noncurrent_days
    }

    # No days or date here: this is about the mark that a deletion leaves, and only where no version is
    # left behind it.
    expiration {
      expired_object_delete_marker = true
    }
  }

  # Nearly all bytes are packs, and a pack holds nothing that its digest does not prove: a mirror has
  # the same one. So they go sooner than versions of history. Of two rules S3 follows the shorter one.
  rule {
    id     = "noncurrent-packs"
    status = "Enabled"
    filter {
      prefix = var.prefix == "" ? "packs/" : "${var.prefix}/packs/"
    }

    noncurrent_version_expiration {
      noncurrent_days = min(var.noncurrent_pack_days, var.noncurrent_days)
    }
  }

  depends_on = [aws_s3_bucket_versioning.registry]
}

resource "aws_s3_bucket_policy" "registry" {
  bucket = aws_s3_bucket.registry.id
  policy = module.policies.bucket_policy

  # S3 refuses two changes of a bucket's access at the same time.
  depends_on = [aws_s3_bucket_public_access_block.registry, aws_s3_bucket_ownership_controls.registry]
}

resource "aws_iam_policy" "role" {
  for_each = module.policies.roles

  name        = "${var.bucket}-${each.key}"
  description = "Holdfast registry s3://${var.bucket}/${var.prefix}: ${each.key}"
  policy      = each.value
  tags        = var.tags
}

locals {
  # Keyed by position: the ARN of a role that is made in the same run is not known beforehand.
  attachments = merge([
    for role, arns in var.principals : {
      for position, arn in arns : "${role}/${position}" => { role = role, arn = arn }
    }
  ]...)
}

resource "aws_iam_role_policy_attachment" "principal" {
  for_each = local.attachments

  # A policy is attached by the name of a role alone, so the role of another account would hand its
  # rights to a role of this account that happens to have that name.
  lifecycle {
    precondition {
      condition     = startswith(each.value.arn, "arn:${data.aws_partition.current.partition}:iam::${data.aws_caller_identity.current.account_id}:role/")
      error_message = "${each.value.arn} is not a role of this account (${data.aws_caller_identity.current.account_id})."
    }
  }

  # A path may stand before the name.
  role       = reverse(split("/", each.value.arn))[0]
  policy_arn = aws_iam_policy.role[each.value.role].arn
}
