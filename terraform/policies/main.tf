# The policies of a registry on S3, as JSON. No provider and no resource: `terraform apply` works
# offline, and everything in here is tested (tests/terraform). The layout of keys is that of
# docs/spec.md, "The store".

terraform {
  required_version = ">= 1.5"
}

locals {
  base   = var.prefix == "" ? "" : "${var.prefix}/"
  bucket = "arn:${var.partition}:s3:::${var.bucket}"
  files  = "${local.bucket}/${local.base}"

  # A `*` also stands for slashes. No key can pass for another kind all the same: ids of runs hold no
  # slash, so "/log/" and "/snapshots/" occur in a key of a run once, behind the id. The names there
  # have 20 digits. A file of a longer or shorter name would stop every collection, and could not be
  # deleted if it counted as history.
  number    = "????????????????????"
  slots     = ["${local.files}runs/*/log/${local.number}"]
  snapshots = ["${local.files}runs/*/snapshots/${local.number}"]
  epochs    = ["${local.files}epochs/*"]
  # Tables of condemned names and their shards: an epoch names them by their digests.
  sweeps = ["${local.files}sweeps/*"]
  # Notes of collectors: each collection relies on those of earlier ones.
  notes = ["${local.files}notes/*"]
  # Markers of sealed runs to which somebody may write again; empty files.
  active = ["${local.files}active/*"]
  # Signatures of the heads of runs: whoever vouches puts them.
  signatures = ["${local.files}signatures/*"]
  config     = ["${local.files}registry.json"]
  probe      = ["${local.files}.probe/*"]
  objects    = [for kind in ["packs", "manifests", "placements"] : "${local.files}${kind}/*"]

  # A PUT that cannot replace anything. The condition asks whether the header is there; the only value
  # that S3 takes is `*`.
  if_absent = { Null = { "s3:if-none-match" = "false" } }

  # Every right that a role can have.
  rights = {
    # For a key that is absent, S3 says 404 to who may list it, 403 to anybody else. It takes the key
    # for the prefix of that question, so the condition does not stand in the way.
    list = {
      for name, value in {
        Sid       = "List"
        Effect    = "Allow"
        Action    = ["s3:ListBucket"]
        Resource  = [local.bucket]
        Condition = { StringLike = { "s3:prefix" = ["${local.base}*"] } }
      } : name => value if name != "Condition" || local.base != ""
    }
    read = { Sid = "Read", Effect = "Allow", Action = ["s3:GetObject"], Resource = ["${local.files}*"] }

    commit = { Sid = "Commit", Effect = "Allow", Action = ["s3:PutObject"], Resource = local.slots, Condition = local.if_absent }

    # Without condition: an object that was found damaged is replaced under its own key. The key is the
    # digest of what belongs there, so whoever puts anything else is found out by the next reader, and
    # versioning keeps what was there.
    store = { Sid = "Store", Effect = "Allow", Action = ["s3:PutObject"], Resource = local.objects }

    # S3 asks for this too where a put names tags (`s3_additional_kwargs.Tagging`), which only those of
    # packs do. `holdfast tier` copies a pack with its tags, and S3 asks whether it may read them.
    tag      = { Sid = "Tag", Effect = "Allow", Action = ["s3:PutObjectTagging"], Resource = ["${local.files}packs/*"] }
    see_tags = { Sid = "SeeTags", Effect = "Allow", Action = ["s3:GetObjectTagging"], Resource = ["${local.files}packs/*"] }

    # Without condition: a snapshot is a cache and may be written over.
    snapshot = { Sid = "Snapshot", Effect = "Allow", Action = ["s3:PutObject"], Resource = local.snapshots }

    condemn = { Sid = "Condemn", Effect = "Allow", Action = ["s3:PutObject"], Resource = concat(local.epochs, local.sweeps, local.notes), Condition = local.if_absent }
    collect = { Sid = "Collect", Effect = "Allow", Action = ["s3:DeleteObject"], Resource = concat(local.objects, local.snapshots, local.active) }

    # Without condition: a marker that is put over is the same empty file. Nobody but a collector may
    # delete one, since it tells that a run may not be passed over.
    announce = { Sid = "Announce", Effect = "Allow", Action = ["s3:PutObject"], Resource = local.active }

    sign = { Sid = "Sign", Effect = "Allow", Action = ["s3:PutObject"], Resource = local.signatures, Condition = local.if_absent }

    # `holdfast tier` copies packs onto themselves, which "store" allows, and asks for archived ones.
    restore = { Sid = "Restore", Effect = "Allow", Action = ["s3:RestoreObject"], Resource = local.objects }

    # Whether what is deleted goes on taking space, which a collector tells.
    versioning = { Sid = "Versioning", Effect = "Allow", Action = ["s3:GetBucketVersioning"], Resource = [local.bucket] }

    init = { Sid = "Init", Effect = "Allow", Action = ["s3:PutObject"], Resource = local.config, Condition = local.if_absent }

    # Scratch: what `init` and `doctor` race over, and the file by which a collector learns the store's
    # time. It also deletes what died there.
    probe = { Sid = "Probe", Effect = "Allow", Action = ["s3:PutObject", "s3:DeleteObject"], Resource = local.probe }

    decrypt = { Sid = "Decrypt", Effect = "Allow", Action = ["kms:Decrypt"], Resource = [var.kms_key_arn] }
    encrypt = { Sid = "Encrypt", Effect = "Allow", Action = ["kms:GenerateDataKey"], Resource = [var.kms_key_arn] }
  }

  read_rights  = concat(["list", "read"], var.kms_key_arn == null ? [] : ["decrypt"])
  write_rights = concat(local.read_rights, var.kms_key_arn == null ? [] : ["encrypt"])

  # Nobody may delete a version, so what a collector deletes and a trainer replaces can be brought back
  # for as long as the bucket keeps noncurrent versions.
  roles = {
    trainer   = concat(local.write_rights, ["commit", "store", "snapshot", "announce", "sign"], var.tags_packs ? ["tag"] : [])
    evaluator = local.read_rights
    annotator = concat(local.write_rights, ["commit", "snapshot", "announce", "sign"])
    collector = concat(local.write_rights, ["commit", "store", "snapshot", "announce", "sign", "condemn", "collect", "restore", "versioning", "probe"], var.tags_packs ? ["tag", "see_tags"] : [])
    operator  = concat(local.write_rights, ["init", "probe"])
  }

  history = concat(local.slots, local.epochs, local.sweeps, local.notes, local.signatures, local.config)

  # A PUT may say how it is to be encrypted. With a key of the client's own, or a KMS key of anybody
  # else, nobody but the writer could read what is put, and S3 would not tell before it is read.
  algorithm = "s3:x-amz-server-side-encryption"
  named_key = "${local.algorithm}-aws-kms-key-id"
  encryptions = merge(
    {
      NoKeyOfAClient = { Null = { "${local.algorithm}-customer-algorithm" = "false" } }
      NoOtherAlgorithm = {
        Null            = { (local.algorithm) = "false" }
        StringNotEquals = { (local.algorithm) = [var.kms_key_arn == null ? "AES256" : "aws:kms"] }
      }
    },
    # Without a key of the bucket's own every key that is named is foreign.
    { for arn in [var.kms_key_arn] : "NoOtherKey" => { Null = { (local.named_key) = "false" } } if arn == null },
    { for arn in [var.kms_key_arn] : "NoOtherKey" => {
      Null            = { (local.named_key) = "false" }
      StringNotEquals = { (local.named_key) = [arn] }
    } if arn != null },
    # An algorithm without a key means the account's own key of AWS.
    { for arn in [var.kms_key_arn] : "NoUnnamedKey" => {
      Null = { (local.algorithm) = "false", (local.named_key) = "true" }
    } if arn != null },
  )

  # What holds for everybody, administrators included, whatever else they are allowed.
  guards = concat([
    {
      Sid       = "TlsOnly"
      Effect    = "Deny"
      Principal = "*"
      Action    = ["s3:*"]
      Resource  = [local.bucket, "${local.bucket}/*"]
      Condition = { Bool = { "aws:SecureTransport" = "false" } }
    },
    {
      Sid       = "HistoryStays"
      Effect    = "Deny"
      Principal = "*"
      Action    = ["s3:DeleteObject", "s3:DeleteObjectVersion"]
      Resource  = local.history
    },
    {
      Sid       = "HistoryIsNotRewritten"
      Effect    = "Deny"
      Principal = "*"
      Action    = ["s3:PutObject"]
      Resource  = local.history
      Condition = { Null = { "s3:if-none-match" = "true" } }
    },
    ], [
    for sid, condition in local.encryptions : {
      Sid       = sid
      Effect    = "Deny"
      Principal = "*"
      Action    = ["s3:PutObject"]
      Resource  = ["${local.bucket}/*"]
      Condition = condition
    }
  ])
}
