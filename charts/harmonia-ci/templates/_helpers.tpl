{{/* What everything is called. A label of 63 letters has to hold the longest of what is made of it: -postgres-0123456789, the revision of a StatefulSet. */}}
{{- define "harmonia-ci.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 43 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 43 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 43 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* dict root component: what a Deployment or a Service selects pods by. */}}
{{- define "harmonia-ci.selector" -}}
app.kubernetes.io/name: harmonia-ci
app.kubernetes.io/instance: {{ include "harmonia-ci.fullname" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* dict root component */}}
{{- define "harmonia-ci.labels" -}}
{{ include "harmonia-ci.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* dict root image */}}
{{- define "harmonia-ci.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "harmonia-ci.imagePullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Pod Security: restricted. */}}
{{- define "harmonia-ci.podSecurity" -}}
runAsNonRoot: true
seccompProfile: {type: RuntimeDefault}
{{- end -}}
{{- define "harmonia-ci.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* What the quickstart brings: "true" where no production value names another one. */}}
{{- define "harmonia-ci.ownPostgres" -}}
{{- if and .Values.quickstart.enabled (not .Values.database.admin.existingSecret) (not .Values.database.operator.existingSecret) }}true{{ end -}}
{{- end -}}
{{- define "harmonia-ci.ownS3" -}}
{{- if and .Values.quickstart.enabled (not .Values.s3.endpoint) (not .Values.s3.existingSecret) }}true{{ end -}}
{{- end -}}
{{- define "harmonia-ci.ownSigning" -}}
{{- if and .Values.quickstart.enabled (not .Values.signing.existingSecret) }}true{{ end -}}
{{- end -}}

{{- define "harmonia-ci.adminTokenSecret" -}}
{{ .Values.adminToken.secret | default (printf "%s-admin-token" (include "harmonia-ci.fullname" .)) }}
{{- end -}}

{{/*
dict root name: "true" if the StatefulSet keeps its data in a volume of its own. Its templates of claims cannot be changed,
therefore what is there decides first.
*/}}
{{- define "harmonia-ci.persistent" -}}
{{- $persistence := .root.Values.quickstart.persistence -}}
{{- $there := lookup "apps/v1" "StatefulSet" .root.Release.Namespace .name -}}
{{- if ne (toString $persistence.enabled) "auto" -}}
{{- if $persistence.enabled }}true{{ end -}}
{{- else if $there -}}
{{- if $there.spec.volumeClaimTemplates }}true{{ end -}}
{{- else if $persistence.storageClassName -}}
true
{{- else -}}
{{- range (lookup "storage.k8s.io/v1" "StorageClass" "" "").items -}}
{{- if eq (index (.metadata.annotations | default dict) "storageclass.kubernetes.io/is-default-class" | default "") "true" }}true{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* dict root name size: the volume `data` of a StatefulSet, as the rest of its spec. */}}
{{- define "harmonia-ci.claim" -}}
{{- if include "harmonia-ci.persistent" . }}
volumeClaimTemplates:
  - apiVersion: v1
    kind: PersistentVolumeClaim
    metadata:
      name: data
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .root.Values.quickstart.persistence.storageClassName }}
      storageClassName: {{ . }}
      {{- end }}
      resources:
        requests:
          storage: {{ .size }}
{{- end }}
{{- end -}}

{{/* dict root name key make: a generated secret's value in base64, as it is in the cluster already, or a new one. */}}
{{- define "harmonia-ci.generated" -}}
{{- $there := lookup "v1" "Secret" .root.Release.Namespace .name -}}
{{- if and $there (hasKey ($there.data | default dict) .key) -}}
{{- index $there.data .key -}}
{{- else -}}
{{- .make | b64enc -}}
{{- end -}}
{{- end -}}
