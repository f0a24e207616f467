{{/* What the operator is told: a document that refuses what it does not know. */}}
{{- define "harmonia-ci.installation" -}}
{{- $name := include "harmonia-ci.fullname" . -}}
{{- $values := .Values -}}

{{- $database := dict -}}
{{- range $role := list "admin" "operator" "signer" "frontend" "evaluator" -}}
{{- $login := index $values.database $role -}}
{{- if $login.existingSecret -}}
{{- $_ := set $database $role (dict "secret" $login.existingSecret "key" $login.key) -}}
{{- end -}}
{{- end -}}
{{- if include "harmonia-ci.ownPostgres" . -}}
{{- $_ := set $database "admin" (dict "secret" (printf "%s-postgres" $name) "key" "url") -}}
{{- end -}}
{{- if not $database.admin -}}
{{- range $role := list "operator" "signer" "frontend" "evaluator" -}}
{{- if not (hasKey $database $role) -}}
{{- fail (printf "The database is missing: set database.admin.existingSecret, or database.%s.existingSecret and those of all other roles, or quickstart.enabled=true." $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- $s3 := dict "bucket" $values.s3.bucket "region" $values.s3.region "virtualHost" $values.s3.virtualHost -}}
{{- if include "harmonia-ci.ownS3" . -}}
{{- $_ := set $s3 "endpoint" (printf "http://%s-s3.%s.svc:9000" $name .Release.Namespace) -}}
{{- $_ := set $s3 "secret" (printf "%s-s3" $name) -}}
{{- else -}}
{{- with $values.s3.endpoint }}{{ $_ := set $s3 "endpoint" . }}{{ end -}}
{{- with $values.s3.existingSecret }}{{ $_ := set $s3 "secret" . }}{{ end -}}
{{- end -}}
{{- with $values.s3.publicEndpoint }}{{ $_ := set $s3 "publicEndpoint" . }}{{ end -}}

{{- $signing := $values.signing.existingSecret -}}
{{- if include "harmonia-ci.ownSigning" . -}}
{{- $signing = printf "%s-signing" $name -}}
{{- else if not $signing -}}
{{- fail "The signing key is missing: set signing.existingSecret to a Secret whose keys are signing keys (harmonia-ci key generate), or quickstart.enabled=true." -}}
{{- end -}}

{{- $roles := dict -}}
{{- range $role := list "frontend" "signer" "evaluator" -}}
{{- $_ := set $roles $role (pick (index $values $role) "replicas" "resources" "nodeSelector" "tolerations") -}}
{{- end -}}
{{- $frontend := merge $roles.frontend (dict
      "url" ($values.frontend.url | default (printf "http://%s-frontend.%s.svc%s" $name .Release.Namespace (eq (int $values.frontend.service.port) 80 | ternary "" (printf ":%v" $values.frontend.service.port))))
      "anonymousRead" $values.frontend.anonymousRead) -}}
{{- $publicUrl := $values.frontend.publicUrl -}}
{{- if and (not $publicUrl) $values.ingress.enabled $values.ingress.host -}}
{{- $publicUrl = printf "%s://%s" (ternary "https" "http" (ne $values.ingress.tlsSecret "")) $values.ingress.host -}}
{{- end -}}
{{- with $publicUrl }}{{ $_ := set $frontend "publicUrl" . }}{{ end -}}
{{- $forges := list -}}
{{- range $values.forges -}}
{{- $forge := dict "name" .name "type" .type "secret" .existingSecret -}}
{{- with .url }}{{ $_ := set $forge "url" . }}{{ end -}}
{{- with .appId }}{{ $_ := set $forge "appId" (int64 .) }}{{ end -}}
{{- with .clientId }}{{ $_ := set $forge "clientId" . }}{{ end -}}
{{- $forges = append $forges $forge -}}
{{- end -}}
{{- $signer := merge $roles.signer (pick $values.signer "sweepEvery" "sweepGrace" "logRetention") -}}
{{- $evaluator := merge $roles.evaluator (pick $values.evaluator "daemonResources" "workers" "memory" "timeout" "networks" "substituters" "trustedPublicKeys") -}}

{{- $pool := dict -}}
{{- if and $values.quickstart.enabled $values.quickstart.pool.name -}}
{{- $spec := deepCopy $values.quickstart.pool.spec -}}
{{- if not $spec.systems -}}
{{- $architecture := "amd64" -}}
{{- with (lookup "v1" "Node" "" "").items -}}
{{- $architecture = (first .).status.nodeInfo.architecture -}}
{{- end -}}
{{- $_ := set $spec "systems" (list (eq $architecture "arm64" | ternary "aarch64-linux" "x86_64-linux")) -}}
{{- end -}}
{{- $definition := .Files.Get "files/crds/builderpools.yaml" | fromYaml -}}
{{- $schema := (first $definition.spec.versions).schema.openAPIV3Schema.properties.spec -}}
{{- include "harmonia-ci.known" (dict "schema" $schema "value" $spec "path" "quickstart.pool.spec") -}}
{{- $pool = dict "name" $values.quickstart.pool.name "spec" $spec -}}
{{- end -}}

{{- $installation := dict
      "name" $name
      "image" (include "harmonia-ci.image" (dict "root" . "image" $values.image))
      "builderImage" (include "harmonia-ci.image" (dict "root" . "image" $values.builderImage))
      "imagePullPolicy" $values.image.pullPolicy
      "imagePullSecrets" $values.imagePullSecrets
      "database" $database
      "s3" $s3
      "signing" (dict "secret" $signing)
      "drainTaints" $values.drainTaints
      "frontend" $frontend
      "signer" $signer
      "evaluator" $evaluator
      "adminToken" (dict "secret" (include "harmonia-ci.adminTokenSecret" .)) -}}
{{- with $pool }}{{ $_ := set $installation "pool" . }}{{ end -}}
{{- with $forges }}{{ $_ := set $installation "forges" . }}{{ end -}}
{{- with $values.oidc -}}
{{- if or .issuer .admins .operators .readers -}}
{{- $oidc := dict "admins" .admins "operators" .operators "readers" .readers -}}
{{- if .issuer -}}
{{- $_ := set $oidc "issuer" .issuer -}}
{{- $_ := set $oidc "clientId" (required "oidc.clientId is missing: what the provider calls this farm" .clientId) -}}
{{- with .existingSecret }}{{ $_ := set $oidc "secret" . }}{{ end -}}
{{- end -}}
{{- $_ := set $installation "oidc" $oidc -}}
{{- end -}}
{{- end -}}
{{- with $values.networkPolicy.forbidden }}{{ $_ := set $installation "forbidden" . }}{{ end -}}
{{- with $values.tracing.endpoint }}{{ $_ := set $installation "tracing" (dict "endpoint" .) }}{{ end -}}
{{- toYaml $installation -}}
{{- end -}}

{{/* dict schema value path: fails for a field that a definition does not have. The API server sees none: the operator would drop it. */}}
{{- define "harmonia-ci.known" -}}
{{- $schema := .schema -}}
{{- $path := .path -}}
{{- if kindIs "map" .value -}}
{{- $fields := $schema.properties | default dict -}}
{{- range $name, $value := .value -}}
{{- $inner := printf "%s.%s" $path $name -}}
{{- if hasKey $fields $name -}}
{{- include "harmonia-ci.known" (dict "schema" (get $fields $name) "value" $value "path" $inner) -}}
{{- else if not (or $schema.additionalProperties (get $schema "x-kubernetes-preserve-unknown-fields")) -}}
{{- fail (printf "%s: a BuilderPool has no such field; `kubectl explain builderpool.spec` and docs/reference/crds.md name those that there are." $inner) -}}
{{- end -}}
{{- end -}}
{{- else if kindIs "slice" .value -}}
{{- range $number, $value := .value -}}
{{- include "harmonia-ci.known" (dict "schema" ($schema.items | default dict) "value" $value "path" (printf "%s[%d]" $path $number)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
