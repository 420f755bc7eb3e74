{{- define "eagle-eye.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Names are "<this>-server" and so on; a release called eagle-eye is not called so twice. */}}
{{- define "eagle-eye.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "eagle-eye.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What follows takes (dict "root" $ "part" "server"). */}}
{{- define "eagle-eye.part" -}}
{{- printf "%s-%s" (include "eagle-eye.fullname" .root) .part -}}
{{- end -}}

{{- define "eagle-eye.selector" -}}
app.kubernetes.io/name: eagle-eye-{{ .part }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end -}}

{{/* Of pods: an upgrade that changes nothing of them starts none again. */}}
{{- define "eagle-eye.podLabels" -}}
{{ include "eagle-eye.selector" . }}
app.kubernetes.io/component: {{ .part }}
app.kubernetes.io/part-of: eagle-eye
{{- end -}}

{{- define "eagle-eye.labels" -}}
{{ include "eagle-eye.podLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "eagle-eye.image" -}}
{{- $image := (index .root.Values .part).image -}}
{{- $name := $image.repository -}}
{{- with .root.Values.image.registry -}}
{{- $name = printf "%s/%s" (trimSuffix "/" .) $name -}}
{{- end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (.root.Values.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* Where the pod may run, and what is on it beside what the part needs. */}}
{{- define "eagle-eye.placement" -}}
{{- $values := index .root.Values .part -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Server and orchestrator run as the user of their images; the volume's files are given to it. */}}
{{- define "eagle-eye.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "eagle-eye.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "eagle-eye.scheme" -}}
{{- ternary "https" "http" (ne .Values.tls.existingSecret "") -}}
{{- end -}}

{{- define "eagle-eye.serverHost" -}}
{{- include "eagle-eye.part" (dict "root" . "part" "server") }}.{{ .Release.Namespace }}.svc
{{- end -}}

{{/* The server as this cluster reaches it. */}}
{{- define "eagle-eye.serverUrl" -}}
{{- include "eagle-eye.scheme" . }}://{{ include "eagle-eye.serverHost" . }}:{{ .Values.server.service.port }}
{{- end -}}

{{/* One of several servers by its pod's name: (dict "root" $ "pod" "..."). */}}
{{- define "eagle-eye.podUrl" -}}
{{- $set := include "eagle-eye.part" (dict "root" .root "part" "servers") -}}
{{- printf "%s://%s.%s.%s.svc:8470" (include "eagle-eye.scheme" .root) .pod $set .root.Release.Namespace -}}
{{- end -}}

{{/* All servers as this cluster reaches them, with commas between. */}}
{{- define "eagle-eye.serverUrls" -}}
{{- if gt (int .Values.server.replicas) 1 -}}
{{- $set := include "eagle-eye.part" (dict "root" . "part" "servers") -}}
{{- range $number := until (int .Values.server.replicas) -}}
{{- if $number }},{{ end -}}
{{- include "eagle-eye.podUrl" (dict "root" $ "pod" (printf "%s-%d" $set $number)) -}}
{{- end -}}
{{- else -}}
{{- include "eagle-eye.serverUrl" . -}}
{{- end -}}
{{- end -}}

{{/* "yes" where the records' password is in a Secret. */}}
{{- define "eagle-eye.recordsPassword" -}}
{{- with .Values.server.records -}}
{{- if and .existingSecret .passwordKey -}}yes{{- end -}}
{{- end -}}
{{- end -}}

{{- define "eagle-eye.recordsEnv" -}}
{{- with .Values.server.records -}}
{{- if .url }}
- name: EAGLE_EYE_RECORDS_URL
  value: {{ .url | quote }}
{{- else if .existingSecret }}
- name: EAGLE_EYE_RECORDS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .urlKey }}
{{- end -}}
{{- end -}}
{{- if eq (include "eagle-eye.recordsPassword" .) "yes" }}
- name: EAGLE_EYE_RECORDS_PASSWORD_FILE
  value: /etc/eagle-eye-records/password
{{- end -}}
{{- end -}}

{{- define "eagle-eye.recordsMount" -}}
{{- if eq (include "eagle-eye.recordsPassword" .) "yes" -}}
- name: records
  mountPath: /etc/eagle-eye-records
  readOnly: true
{{- end -}}
{{- end -}}

{{- define "eagle-eye.claim" -}}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ include "eagle-eye.part" . }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "eagle-eye.labels" . | nindent 4 }}
  annotations:
    # What it holds cannot be made again: helm uninstall leaves it.
    helm.sh/resource-policy: keep
    {{- with .persistence.annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "eagle-eye.claimSpec" .persistence | nindent 2 }}
{{- end -}}

{{- define "eagle-eye.claimSpec" -}}
accessModes: [{{ .accessMode }}]
{{- with .storageClassName }}
storageClassName: {{ . | quote }}
{{- end }}
resources:
  requests:
    storage: {{ .size }}
{{- end -}}

{{/* The binding of a cluster role, in some namespaces or, where none is named, in all: (dict "root" "part" "role" "namespaces"). */}}
{{- define "eagle-eye.bindings" -}}
{{- $account := include "eagle-eye.part" . -}}
{{- $of := . -}}
{{- range (.namespaces | default (list "")) }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ ternary "RoleBinding" "ClusterRoleBinding" (ne . "") }}
metadata:
  name: {{ $of.role }}
  {{- with . }}
  namespace: {{ . }}
  {{- end }}
  labels:
    {{- include "eagle-eye.labels" $of | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: {{ $of.role }}
subjects:
  - kind: ServiceAccount
    name: {{ $account }}
    namespace: {{ $of.root.Release.Namespace }}
{{- end }}
{{- end -}}
