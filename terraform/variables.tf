variable "bucket" {
  description = "Name of the bucket to make. One registry lies in it."
  type        = string
}

variable "prefix" {
  description = "Where in the bucket the registry lies, without slashes at the ends; \"\" for the whole bucket."
  type        = string
  default     = ""
}

variable "kms_key_arn" {
  description = "A KMS key to encrypt with; null for keys of S3's own. Its key policy must let IAM decide."
  type        = string
  default     = null
}

variable "noncurrent_pack_days" {
  description = "For how many days a pack that was deleted or replaced can be brought back, and goes on taking space."
  type        = number
  default     = 3

  validation {
    condition     = var.noncurrent_pack_days >= 1
    error_message = "At least one day."
  }
}

variable "noncurrent_days" {
  description = "The same for everything that is no pack: small, and with all of the history."
  type        = number
  default     = 30

  validation {
    condition     = var.noncurrent_days >= 1
    error_message = "At least one day."
  }
}

variable "teams" {
  description = "Names of teams. Each gets roles trainer-TEAM and annotator-TEAM, which write only to runs that are named TEAM-..."
  type        = list(string)
  default     = []

  # A hyphen would let the runs of one team pass for those of another, and so would a wildcard.
  validation {
    condition     = alltrue([for team in var.teams : can(regex("^[A-Za-z0-9_]+$", team))])
    error_message = "The name of a team is A-Z, a-z, 0-9 and _."
  }
}

variable "tags_packs" {
  description = "Whether packs are put with tags: trainers and collectors then may tag packs."
  type        = bool
  default     = false
}

variable "principals" {
  description = "By role (trainer, evaluator, annotator, collector, operator, and trainer-TEAM, annotator-TEAM), ARNs of IAM roles of this account that get its policy."
  type        = map(list(string))
  default     = {}

  validation {
    condition     = alltrue([for role in keys(var.principals) : can(regex("^(evaluator|collector|operator|(trainer|annotator)(-[A-Za-z0-9_]+)?)$", role))])
    error_message = "A role is one of trainer, evaluator, annotator, collector and operator, or trainer-TEAM or annotator-TEAM."
  }

  validation {
    condition     = alltrue([for arn in flatten(values(var.principals)) : can(regex("^arn:[a-z-]+:iam::[0-9]{12}:role/", arn))])
    error_message = "A principal is an IAM role: arn:aws:iam::123456789012:role/NAME."
  }
}

variable "tags" {
  description = "Tags for the bucket and the policies."
  type        = map(string)
  default     = {}
}
