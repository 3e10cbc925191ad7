{{/* Names, labels and images. */}}

{{- define "octavo.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 24 | trimSuffix "-" -}}
{{- end -}}

{{/* 24 characters at most: a StatefulSet's name, with a model's id of up to 20, leaves room for the hash of its revisions. */}}
{{- define "octavo.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 24 | trimSuffix "-" -}}
{{- else if contains (include "octavo.name" .) .Release.Name -}}
{{- .Release.Name | trunc 24 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "octavo.name" .) | trunc 24 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "octavo.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "octavo.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{/* Labels that select pods: they may never change. Takes (dict "root" $ "component" "router"). */}}
{{- define "octavo.selectorLabels" -}}
app.kubernetes.io/name: {{ include "octavo.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .model }}
octavo.dev/model: {{ . }}
{{- end }}
{{- end -}}

{{/* Labels of pods: nothing that changes with a version of the chart alone, which would restart them. */}}
{{- define "octavo.podLabels" -}}
{{ include "octavo.selectorLabels" . }}
app.kubernetes.io/part-of: octavo
{{- end -}}

{{- define "octavo.labels" -}}
{{ include "octavo.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: octavo
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Takes (dict "root" $ "image" <what wins over the common image, or nothing>). */}}
{{- define "octavo.image" -}}
{{- $own := .image | default dict -}}
{{- $common := .root.Values.image -}}
{{- $repository := $own.repository | default $common.repository -}}
{{- $digest := $own.digest | default (ternary "" $common.digest (or (ne ($own.repository | default "") "") (ne ($own.tag | default "") ""))) -}}
{{- if $digest -}}
{{- printf "%s@%s" $repository $digest -}}
{{- else -}}
{{- printf "%s:%s" $repository ($own.tag | default $common.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}
