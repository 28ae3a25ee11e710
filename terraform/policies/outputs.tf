output "roles" {
  description = "By role, the JSON of the policy that it needs."
  value = {
    for role, rights in local.roles :
    role => jsonencode({
      Version   = "2012-10-17"
      Statement = [for right in rights : local.rights[right]]
    })
  }
}

output "bucket_policy" {
  description = "The JSON of the bucket's own policy."
  value       = jsonencode({ Version = "2012-10-17", Statement = local.guards })
}
