locals {
  documents = {
    for role, rights in local.roles :
    role => jsonencode({
      Version   = "2012-10-17"
      Statement = [for right in rights : local.rights[right]]
    })
  }

  # The same roles of a team put slots, snapshots, markers and signatures of its own runs alone. Names of teams have no
  # hyphen, so the runs of one team are never those of another.
  of_teams = {
    for pair in setproduct(["trainer", "annotator"], var.teams) :
    "${pair[0]}-${pair[1]}" => replace(
      replace(
        replace(local.documents[pair[0]], "runs/*/", "runs/${pair[1]}-*/"), "active/*", "active/${pair[1]}-*"
      ), "signatures/*", "signatures/${pair[1]}-*"
    )
  }
}

output "roles" {
  description = "By role, the JSON of the policy that it needs."
  value       = merge(local.documents, local.of_teams)
}

output "bucket_policy" {
  description = "The JSON of the bucket's own policy."
  value       = jsonencode({ Version = "2012-10-17", Statement = local.guards })
}
