variable "bucket" {
  description = "Name of the bucket."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "Not the name of a bucket: 3 to 63 of a-z, 0-9, '.' and '-'."
  }
}

variable "prefix" {
  description = "Where in the bucket the registry lies, without slashes at the ends; \"\" for the whole bucket."
  type        = string
  default     = ""

  # A wildcard or a policy variable in here would open other prefixes.
  validation {
    condition     = can(regex("^([A-Za-z0-9!_.'()-]+(/[A-Za-z0-9!_.'()-]+)*)?$", var.prefix))
    error_message = "A prefix is names of A-Z, a-z, 0-9 and !_.'()- with single slashes between them."
  }
}

variable "kms_key_arn" {
  description = "The KMS key that encrypts the bucket; null where S3 does it with its own keys."
  type        = string
  default     = null
}

variable "partition" {
  description = "\"aws\", \"aws-cn\" or \"aws-us-gov\"."
  type        = string
  default     = "aws"
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
